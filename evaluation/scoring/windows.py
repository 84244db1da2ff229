"""The four protocols as lists of windows.

A protocol defines the windows and how many of the last outputs of each count. The counted targets
are in (document, index) order, the same at every length, so lengths are comparable target by
target.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from errors import EvaluationError
from evaluation.scoring.targets import TargetSet, draw_integer
from evaluation.scoring.text import EvaluationText

# (windows (n, L+1) int64, keep K) -> NLL in nats (n, K) float64
Scorer = Callable[[np.ndarray, int], np.ndarray]
Window = tuple[int, int, int, int]  # document, end, inputs, keep


@dataclass(frozen=True)
class TargetWindows:
    """Windows in target order. The last `keep` of the `inputs` outputs of each count. All arrays
    (n,) int64.
    """

    document: np.ndarray
    end: np.ndarray  # exclusive, in text coordinates: the window is text[end - inputs - 1 : end]
    inputs: np.ndarray
    keep: np.ndarray

    @classmethod
    def of(cls, rows: list[Window]) -> "TargetWindows":
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)

    def __len__(self) -> int:
        return len(self.end)

    def rows(self) -> list[list[int]]:
        """[document, end, keep] of each window."""
        return np.stack([self.document, self.end, self.keep], axis=1).tolist()

    def take(self, rows: np.ndarray) -> "TargetWindows":
        """Some of the windows."""
        return TargetWindows(
            document=self.document[rows],
            end=self.end[rows],
            inputs=self.inputs[rows],
            keep=self.keep[rows],
        )

    @property
    def n_targets(self) -> int:
        return int(self.keep.sum())

    def target_documents(self) -> np.ndarray:
        """(n_targets,) the document of every counted target."""
        return np.repeat(self.document, self.keep)

    def target_indices(self) -> np.ndarray:
        """(n_targets,) text index of every counted target."""
        last = np.repeat(np.cumsum(self.keep), self.keep)
        return np.repeat(self.end, self.keep) - (last - np.arange(self.n_targets))

    def target_positions(self) -> np.ndarray:
        """(n_targets,) position in its window of the input that predicts each target: 0 sees one
        token."""
        return self.target_indices() - np.repeat(self.end - self.inputs, self.keep)


def fixed_windows(targets: TargetSet, length: int) -> TargetWindows:
    """`fixed-targets`: one window of `length` inputs per span; target k of K sees length - K + k
    tokens."""
    return TargetWindows(
        document=targets.document,
        end=targets.end,
        inputs=np.full_like(targets.end, length),
        keep=np.full_like(targets.end, targets.span),
    )


def _stepped(document: int, end: int, stop: int, length: int, step: int) -> Iterator[Window]:
    """Windows of `length` inputs after one that ends at `end`; each counts the next `step`
    outputs."""
    ends = [*range(end, stop, step), stop] if end < stop else []
    for before, here in pairwise(ends):
        yield document, here, length, here - before


def sliding_windows(
    text: EvaluationText,
    documents: np.ndarray,
    length: int,
    stride: int,
) -> TargetWindows:
    """`sliding`: the last `stride` outputs count, all of the first window, and the tail with full
    context."""
    if not 1 <= stride <= length:
        raise EvaluationError(f"stride={stride} must lie between 1 and the length {length}")
    rows = []
    for document in documents.tolist():
        rows.append((document, length + 1, length, length))
        rows += _stepped(document, length + 1, int(text.lengths[document]), length, stride)
    return TargetWindows.of(rows)


def block_windows(
    text: EvaluationText,
    documents: np.ndarray,
    length: int,
    longest: int,
) -> TargetWindows:
    """`non-overlapping`: all outputs count; each document cut to a multiple of Lmax, which `length`
    divides.
    """
    if longest % length:
        raise EvaluationError(
            f"protocol=non-overlapping needs lengths that divide the longest: {length} does not "
            f"divide {longest}"
        )
    rows = []
    for document in documents.tolist():
        end = (int(text.lengths[document]) - 1) // longest * longest
        rows += [(document, start + length + 1, length, length) for start in range(0, end, length)]
    return TargetWindows.of(rows)


def position_windows(
    text: EvaluationText,
    documents: np.ndarray,
    longest: int,
    per_document: int,
    seed: int,
) -> TargetWindows:
    """`by-position`: windows of Lmax at seeded random offsets (they may overlap), all outputs
    count."""
    rows = []
    for document in documents.tolist():
        room = int(text.lengths[document]) - longest  # offsets 0 .. room - 1
        key = f"{seed}|{longest}|{document}"
        offsets = [draw_integer(key, "offset", i) % room for i in range(per_document)]
        rows += [(document, offset + longest + 1, longest, longest) for offset in sorted(offsets)]
    return TargetWindows.of(rows)


def truncated_windows(whole: TargetWindows, length: int, span: int) -> TargetWindows:
    """The targets of `whole` again, each seeing at most `length` tokens of its own window.

    Windows advance by `span`, so that a target sees between length - span + 1 and `length` tokens,
    as a fixed target does. A target among the first `length` of its window sees all tokens before
    it in the window.
    """
    rows = []
    for document, end, inputs in whole.rows():  # all inputs of a whole window count
        first = min(length, inputs)
        begin = end - inputs + first
        rows.append((document, begin, first, first))
        rows += _stepped(document, begin, end, length, span)
    return TargetWindows.of(rows)
