"""Expressions in claims and trends. An expression gives one number for each seed, from the measured
values of the arms of a study in its results.json.

An expression is a number; a value of one arm, such as {scheme: rope, length: 256}; a change of such
a value, {scheme: rope, length: 256, from: 64}; or an operator with its operands, {minus: [A, B]}.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Expression = Any  # a number, or a mapping as above
# Number of operands and function of each operator.
OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "minus": (2, np.subtract),
    "times": (2, np.multiply),
    "absolute": (1, np.abs),
}
# Keys of a value besides the axes of the grid, with their defaults.
DEFAULTS = {"evaluation": None, "metric": "nll", "method": "trained", "length": None}
FROM = "from"  # the length at which a change begins


def operator_of(tree: Expression) -> str | None:
    """The operator of an expression; None for a number or a value."""
    keys = tree if isinstance(tree, dict) else ()
    return next((key for key in keys if key in OPERATORS), None)


def expanded(tree: Expression, axes: list[str], more: dict[str, str]) -> Expression:
    """The expression with changes written as differences and the labels `more` in every value.
    Raises ValueError that names the invalid part."""
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
    """Evaluate an expression elementwise. `read` returns the array (or number) of a value."""
    name = operator_of(tree)
    if name is not None:
        _, function = OPERATORS[name]
        return function(*(evaluate(operand, read) for operand in tree[name]))
    return read(tree) if isinstance(tree, dict) else tree
