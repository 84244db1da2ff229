"""Several texts in one run: which of them each sample comes from.

A fixed pattern over the samples, repeated: after any number of samples a text has had its share of them to
within one. Nothing is drawn, so that a run resumed anywhere, on any number of ranks, goes on alike.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from data.errors import DataError

LONGEST = 10_000  # samples before a pattern repeats


class Pattern:
    """shares: of each text, exact, with the sum 1."""

    def __init__(self, shares: Sequence[Fraction]):
        self.period = lcm(*(share.denominator for share in shares))
        if self.period > LONGEST:
            raise DataError(
                f"the shares of a mixture repeat only after {self.period:,} windows: give them with four "
                "decimals at most"
            )
        parts = [int(share * self.period) for share in shares]
        self._turns = np.array(_quota(parts), dtype=np.int64)
        marks = self._turns[None] == np.arange(len(parts))[:, None]
        self._before = np.concatenate([np.zeros((len(parts), 1), dtype=np.int64), np.cumsum(marks, 1)], 1)

    def turns(self, sample: np.ndarray) -> np.ndarray:
        """The text of each sample 0, 1, ...: int64."""
        return self._turns[sample % self.period]

    def before(self, source: int, sample: np.ndarray) -> np.ndarray:
        """How many of the samples before each of these are of the text `source`: int64."""
        rounds, rest = np.divmod(sample, self.period)
        return rounds * self._before[source, -1] + self._before[source, rest]


def _quota(parts: list[int]) -> list[int]:
    """Turns of sum(parts) samples by the quota method of Balinski and Young (1975): after n turns each has
    had its share of n to less than one."""
    whole, had, turns = sum(parts), [0] * len(parts), []
    for n in range(1, whole + 1):
        due = [j for j, part in enumerate(parts) if had[j] * whole < part * n]
        turn = min(due, key=lambda j: (Fraction(had[j] + 1, parts[j]), j))
        had[turn] += 1
        turns.append(turn)
    return turns
