"""How numbers are printed in summaries, tables and figures."""

import math
from collections.abc import Sequence

from evaluation.results_table import ResultRow


def plain(value: float, digits: int = 3) -> str:
    """`0.012` or `−0.012`; no sign for zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    """`+0.012` or `−0.012`; no sign for zero."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}".replace("-", "−") if rounded else f"{0:.{digits}f}"


def with_ends(value: float, low: float, high: float, digits: int = 3) -> str:
    """`+0.123 [+0.100, +0.146]`, or the value alone for a point estimate."""
    if math.isnan(low):
        return signed(value, digits)
    return f"{signed(value, digits)} [{signed(low, digits)}, {signed(high, digits)}]"


def interval_text(row: ResultRow) -> str:
    return with_ends(row.value, row.low, row.high)


def percent(share: float, low: float = math.nan, high: float = math.nan) -> str:
    """`12.3% [10.0%, 14.6%]`, or the share alone where an end is NaN."""
    return f"{share:.1%}" if math.isnan(low) else f"{share:.1%} [{low:.1%}, {high:.1%}]"


def listed(items: Sequence[str]) -> str:
    """`a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def counted(n: int, noun: str) -> str:
    """`1 unit`, `2 units`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def dtype_note(dtype: str) -> str:
    """`, bfloat16` for titles of results that were not measured in float32, else ''."""
    return "" if dtype == "float32" else f", {dtype}"
