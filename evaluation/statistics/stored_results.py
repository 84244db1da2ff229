"""Stored results of one variant, from which the rows of tables are computed."""

from typing import Any, NamedTuple


class StoredResults(NamedTuple):
    """results.json of an evaluation of one run of a variant. `seed`: training seed; '' for an
    evaluation of single runs."""

    variant: str
    method: str
    seed: str
    record: dict[str, Any]
