"""Expressions: one number for each seed, from the measured values of the arms of a study, which
claims and trends read from its results.json.

An expression is a number; a value of one arm, such as {scheme: rope, length: 256}, which is a
change with `from`, {scheme: rope, length: 256, from: 64}; or an operator with its operands,
{minus: [A, B]}.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from errors import StudyError
from evaluation.evaluation_settings import tokens_of

Expression = Any  # a number, or a mapping as above
# Operands and function of each operator.
OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "minus": (2, np.subtract),
    "times": (2, np.multiply),
    "absolute": (1, np.abs),
}
# Keys of a value besides the axes of the grid, and what they are where they are not given.
DEFAULTS = {"evaluation": None, "metric": "nll", "method": "trained", "length": None}
FROM = "from"  # the length that a change begins at


def operator_of(tree: Expression) -> str | None:
    """The operator of an expression; None for a number or a value."""
    keys = tree if isinstance(tree, dict) else ()
    return next((key for key in keys if key in OPERATORS), None)


def expanded(tree: Expression, axes: list[str], more: dict[str, str]) -> Expression:
    """The expression with changes written as differences and the labels `more` in every value.
    Raises ValueError with the part that is no expression."""
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return tree
    if not isinstance(tree, dict) or not tree:
        raise ValueError(f"{tree}: write a value such as {{scheme: rope, length: 256}}")
    name = operator_of(tree)
    if name is not None:
        operands = tree[name]
        count = OPERATORS[name][0]
        if len(tree) > 1 or not isinstance(operands, list) or len(operands) != count:
            raise ValueError(f"{name} has a list of {count} operands and stands alone, not {tree}")
        return {name: [expanded(operand, axes, more) for operand in operands]}
    known = [*axes, *DEFAULTS, FROM]
    if unknown := [key for key in tree if key not in known]:
        raise ValueError(
            f"{unknown[0]} is neither an operator ({', '.join(OPERATORS)}) nor a key of a value "
            f"({', '.join(known)})"
        )
    value = {key: each for key, each in tree.items() if key != FROM} | more
    if FROM not in tree:
        return value
    return {"minus": [value, value | {"length": tree[FROM]}]}


def values_in(tree: Expression) -> list[dict]:
    """The values of arms that an expression reads."""
    name = operator_of(tree)
    if name is not None:
        return [value for operand in tree[name] for value in values_in(operand)]
    return [tree] if isinstance(tree, dict) else []


def evaluate(tree: Expression, read: Callable[[dict], Any]) -> Any:
    """The number of an expression for each element of what `read` returns for a value."""
    name = operator_of(tree)
    if name is not None:
        _, function = OPERATORS[name]
        return function(*(evaluate(operand, read) for operand in tree[name]))
    return read(tree) if isinstance(tree, dict) else tree


# Values of arms, from the cells of results.json of a study.


def evaluation_of(cell: dict, value: dict) -> str:
    """The evaluation that a value names, or the first one of its cell."""
    return value.get("evaluation") or next(iter(cell["evaluations"]))


def unit_values(cell: dict, value: dict) -> pd.DataFrame:
    """A value of an arm by unit: `mean` and `targets`, or items. Read gains are of all distances
    from `distance` on. Raises StudyError if it was not measured."""
    asked = DEFAULTS | value
    metric = asked["metric"]
    name = evaluation_of(cell, value)
    record = cell["evaluations"][name]
    trained_length = cell["training"]["train_length"]

    def is_asked(row: dict) -> bool:
        length = row["length"] if asked["length"] is None else asked["length"]
        place = (asked["method"], tokens_of(length, trained_length))
        return (row["method"], row["length"]) == place

    if metric == "read_gain":
        least = tokens_of(value.get("distance", 0), trained_length)
        parts = [
            {
                "unit": row["units"],
                "mean": np.subtract(row["unit_control_nll"], row["unit_nll"]),
                "targets": row["unit_targets"],
            }
            for row in record["repeated"]["cells"]
            if is_asked(row) and row["distance_low"] >= least
        ]
    else:
        units = record.get("units", {})
        rows = filter(is_asked, record.get("cells", ()))
        means: list[Any] = [row.get(f"unit_{metric}") or [row.get(metric)] for row in rows]
        parts = []
        for own in [each for each in means if None not in each][:1]:
            counts = units.get("targets") or units.get("items") or [1] * len(own)
            names = units.get("names") or range(len(counts))
            mean = np.broadcast_to(own, len(counts))
            parts.append({"unit": names, "mean": mean, "targets": counts})
    if not parts:
        raise StudyError(f"{cell['id']}: evaluation {name} has no {value}")
    table = pd.concat(map(pd.DataFrame, parts))
    table["mean"] *= table["targets"]
    sums = table.groupby("unit")[["mean", "targets"]].agg("sum")
    return sums.assign(mean=sums["mean"] / sums["targets"])


def mean_of(units: pd.DataFrame) -> float:
    """The mean over targets of `unit_values`."""
    return float(np.average(units["mean"], weights=units["targets"]))


def means_without_unit(units: pd.DataFrame) -> np.ndarray:
    """(D,) means over all units but one, weighted by their targets."""
    sums = (units["mean"] * units["targets"]).to_numpy()
    counts = units["targets"].to_numpy()
    return (sums.sum() - sums) / np.maximum(counts.sum() - counts, 1)
