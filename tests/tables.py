"""Single rows of a table of results."""

from evaluation.statistics.results_table import ResultRow


def find(table, variant, metric, length=None, where="", at=None) -> ResultRow | None:
    """The row over all seeds at this place."""
    wanted = (variant, metric, length, where, at, "")
    found = [row for row in map(ResultRow._make, table.values.tolist()) if row.key == wanted]
    assert len(found) < 2
    return found[0] if found else None


def value(table, variant, metric, length=None) -> float | None:
    row = find(table, variant, metric, length)
    return None if row is None else row.value
