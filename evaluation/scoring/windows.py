"""The four protocols as lists of windows.

A protocol defines the windows and how many of the last outputs of each count. The counted targets
are in (document, index) order, the same at every length, so lengths are comparable target by
target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from errors import EvaluationError
from evaluation.scoring.targets import TargetSet, draw_documents, draw_integer, too_few
from evaluation.scoring.text import EvaluationText

Scorer = Callable[
    [np.ndarray, int], np.ndarray
]  # (windows (n, L+1) int64, keep K) -> NLL in nats (n, K) float64


@dataclass(frozen=True)
class TargetWindows:
    """Windows in target order. The last `keep` of the `inputs` outputs of each count. All arrays
    (n,) int64.
    """

    document: np.ndarray
    end: np.ndarray  # exclusive, in text coordinates: the window is text[end - inputs - 1 : end]
    inputs: np.ndarray
    keep: np.ndarray

    def __len__(self) -> int:
        return len(self.end)

    def part(self, row: int) -> "TargetWindows":
        """One of the windows."""
        arrays = (self.document, self.end, self.inputs, self.keep)
        return TargetWindows(*(array[row : row + 1] for array in arrays))

    @property
    def n_targets(self) -> int:
        return int(self.keep.sum())

    @property
    def n_inputs(self) -> int:
        return int(self.inputs.sum())

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


def _windows(rows: list[tuple[int, int, int, int]]) -> TargetWindows:
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return TargetWindows(table[:, 0], table[:, 1], table[:, 2], table[:, 3])


def fixed_windows(targets: TargetSet, length: int) -> TargetWindows:
    """`fixed-targets`: one window of `length` inputs per span; target k of K sees length - K + k
    tokens."""
    if not targets.span <= length <= targets.longest:
        raise EvaluationError(
            f"length {length} must lie between targets={targets.span} and the longest, "
            f"{targets.longest}"
        )
    n = len(targets.end)
    return TargetWindows(
        targets.document, targets.end, np.full(n, length), np.full(n, targets.span)
    )


def _stepped(
    document: int, end: int, stop: int, length: int, step: int
) -> list[tuple[int, int, int, int]]:
    """Windows of `length` inputs after one that ends at `end`; each counts the next `step`
    outputs."""
    ends = [*range(end + step, stop, step), stop] if end < stop else []
    return [(document, at, length, at - before) for before, at in pairwise([end, *ends])]


def sliding_windows(
    text: EvaluationText, documents: np.ndarray, length: int, stride: int
) -> TargetWindows:
    """`sliding`: the last `stride` outputs count, all of the first window, and the tail with full
    context."""
    if not 1 <= stride <= length:
        raise EvaluationError(f"stride={stride} must lie between 1 and the length {length}")
    rows = []
    for document in documents.tolist():
        rows.append((document, length + 1, length, length))
        rows += _stepped(
            document,
            length + 1,
            int(text.lengths[document]),
            length,
            stride,
        )
    return _windows(rows)


def block_windows(
    text: EvaluationText, documents: np.ndarray, length: int, longest: int
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
        blocks = (int(text.lengths[document]) - 1) // longest * longest // length
        rows += [(document, block * length + length + 1, length, length) for block in range(blocks)]
    return _windows(rows)


def position_windows(
    text: EvaluationText, documents: np.ndarray, longest: int, per_document: int, seed: int
) -> TargetWindows:
    """`by-position`: windows of Lmax at seeded random offsets (they may overlap), all outputs
    count."""
    rows = []
    for document in documents.tolist():
        room = int(text.lengths[document]) - longest  # offsets 0 .. room - 1
        draws = [
            draw_integer(f"{seed}|{longest}|{document}", "offset", i) % room
            for i in range(per_document)
        ]
        rows += [(document, offset + longest + 1, longest, longest) for offset in sorted(draws)]
    return _windows(rows)


def truncated_windows(
    whole: TargetWindows,
    length: int,
    span: int,
) -> TargetWindows:
    """The targets of `whole` again, each seeing at most `length` tokens of its own window.

    Windows advance by `span`, so that a target sees between length - span + 1 and `length` tokens,
    as a fixed target does. A target among the first `length` of its window sees all tokens before
    it in the window.
    """
    rows = []
    for document, end, inputs in np.stack(
        [whole.document, whole.end, whole.inputs], axis=1
    ).tolist():
        first = min(length, inputs)
        begin = end - inputs + first
        rows.append((document, begin, first, first))
        rows += _stepped(document, begin, end, length, span)
    return _windows(rows)


def long_documents(
    text: EvaluationText, longest: int, limit: int, seed: int, least: int = 1
) -> np.ndarray:
    """Documents with more than `longest` tokens, at most `limit` of them by a seeded choice;
    ascending."""
    room = text.lengths - 1
    least = max(1, least)
    if (room >= longest).sum() < least:
        raise EvaluationError(too_few(room, longest, least, f"at least {longest + 1} tokens"))
    return draw_documents(f"{seed}|{longest}", room >= longest, limit)
