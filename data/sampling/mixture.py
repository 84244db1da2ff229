"""Mixtures of several texts: assigns each sample of a run to one text.

The assignment is a fixed, repeating pattern. After any number of samples, the count of samples of
each text is within one of its share. Nothing is random, so the pattern is the same after a resume
and on any number of ranks.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np


class MixturePattern:
    """shares: exact fraction of samples for each text; the sum is 1."""

    def __init__(self, shares: Sequence[Fraction]):
        self.period = lcm(*(share.denominator for share in shares))
        parts = [int(share * self.period) for share in shares]
        self._turns = np.array(_quota(parts), dtype=np.int64)
        marks = self._turns[None] == np.arange(len(parts))[:, None]
        self._before = np.concatenate(
            [np.zeros((len(parts), 1), dtype=np.int64), np.cumsum(marks, 1)], 1
        )

    def turns(self, sample: np.ndarray) -> np.ndarray:
        """Return the text of each sample 0, 1, ...: int64."""
        return self._turns[sample % self.period]

    def before(self, source: int, sample: np.ndarray) -> np.ndarray:
        """For each sample, count the earlier samples of text `source`: int64."""
        rounds, rest = np.divmod(sample, self.period)
        return rounds * self._before[source, -1] + self._before[source, rest]


def _quota(parts: list[int]) -> list[int]:
    """Assign sum(parts) samples to texts by the quota method of Balinski and Young (1975). After n
    samples, the count of each text differs from its share of n by less than one.
    """
    whole = sum(parts)
    had = [0] * len(parts)
    turns = []
    for n in range(1, whole + 1):
        due = [j for j, part in enumerate(parts) if had[j] * whole < part * n]
        turn = min(due, key=lambda j: (Fraction(had[j] + 1, parts[j]), j))
        had[turn] += 1
        turns.append(turn)
    return turns
