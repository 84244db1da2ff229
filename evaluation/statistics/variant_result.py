"""Stored results of one variant: what the rows of tables are computed from."""

from typing import Any, NamedTuple


class VariantResult(NamedTuple):
    """results.json of an evaluation of one run of a variant. `seed`: of its training; '' for an
    evaluation of single runs."""

    variant: str
    method: str
    seed: str
    record: dict[str, Any]
