"""Numbers as result files and sentences spell them."""

import math

from evaluation.statistics import Interval


def finite(value: float) -> float | None:
    """NaN and infinity are not JSON: an end that does not exist is null."""
    return value if math.isfinite(value) else None


def signed(value: float) -> str:
    """A difference in nats with its sign and three digits."""
    return f"{round(value, 3) + 0.0:+.3f}"  # + 0.0: no minus before a zero


def ends(interval: Interval) -> str:
    """`[low, high]`, '' where there are none."""
    return "" if math.isnan(interval.low) else f"[{signed(interval.low)}, {signed(interval.high)}]"
