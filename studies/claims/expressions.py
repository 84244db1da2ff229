"""Expressions of a claim: one number for each seed, from the measured values of its arms.

An expression is a number, a value of one arm, such as {scheme: rope, length: 256}, or an operator
with its operands: {minus: [{scheme: rope, length: 256}, {scheme: rope, length: 64}]}.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Expression = Any  # a number, or a mapping as above
Read = Callable[[dict], np.ndarray]  # the values of one arm, all of the same shape

# Operands and function of each operator.
OPERATORS: dict[str, tuple[int, Callable[..., Any]]] = {
    "minus": (2, np.subtract),
    "times": (2, np.multiply),
    "absolute": (1, np.abs),
}
SIGNS = {"minus": "−", "times": "·"}
# Keys of a value besides the axes of the grid, and what they are where they are not given.
DEFAULTS = {"evaluation": None, "metric": "nll", "method": "trained", "length": None}


def check_expression(tree: Expression, axes: list[str]) -> Expression:
    """The expression. Raises ValueError with the part that is none."""
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return tree
    if not isinstance(tree, dict) or not tree:
        raise ValueError(f"{tree}: write a value such as {{scheme: rope, length: 256}}")
    name = operator_of(tree)
    if name is None:
        known = {*axes, *DEFAULTS}
        if unknown := [key for key in tree if key not in known]:
            raise ValueError(
                f"{unknown[0]} is neither an operator ({', '.join(OPERATORS)}) nor a key of a "
                f"value ({', '.join(sorted(known))})"
            )
        return tree
    count, _ = OPERATORS[name]
    operands = tree[name]
    if len(tree) > 1 or not isinstance(operands, list) or len(operands) != count:
        raise ValueError(f"{name} has a list of {count} operands and stands alone, not {tree}")
    return {name: [check_expression(operand, axes) for operand in operands]}


def operator_of(tree: Expression) -> str | None:
    """The operator of an expression; None for a number or a value."""
    return next((key for key in tree if key in OPERATORS), None) if isinstance(tree, dict) else None


def values_in(tree: Expression) -> Iterator[dict]:
    """The values of arms that an expression reads."""
    name = operator_of(tree)
    if name is not None:
        for operand in tree[name]:
            yield from values_in(operand)
    elif isinstance(tree, dict):
        yield tree


def evaluate(tree: Expression, read: Read) -> Any:
    """The number of an expression for each element of what `read` returns."""
    name = operator_of(tree)
    if name is not None:
        _, function = OPERATORS[name]
        return function(*(evaluate(operand, read) for operand in tree[name]))
    return read(tree) if isinstance(tree, dict) else tree


def in_words(tree: Expression) -> str:
    """`nll(rope, 256) − nll(rope, 64)`."""
    name = operator_of(tree)
    if name is not None:
        operands = [in_words(operand) for operand in tree[name]]
        if name == "absolute":
            return f"|{operands[0]}|"
        first, second = operands
        is_nested = operator_of(tree[name][1]) is not None
        return f"{first} {SIGNS[name]} {f'({second})' if is_nested else second}"
    if not isinstance(tree, dict):
        return f"{tree:g}"
    words = [str(word) for key, word in tree.items() if key not in ("metric", "evaluation")]
    return f"{tree.get('metric', DEFAULTS['metric'])}({', '.join(words)})"
