"""The order in which training sees a store: a pure function of (seed, step).

An epoch's documents are permuted and laid end to end; the line is cut in windows of T inputs (a window's last
target is the next window's first input); the windows are permuted too. Neither live random state nor the
number of ranks enters, so a run can be resumed, or shared among more processes, at any step.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from data.draws import permuted
from data.errors import DataError
from data.positions import PACKINGS, place
from data.settings import PlainPositions
from data.store import Store

PLAIN = PlainPositions()
IGNORED = -100  # a target that is not counted


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step. T = train length, b = rows of this rank."""

    tokens: torch.Tensor  # (b, T) int64
    targets: torch.Tensor  # (b, T) int64, IGNORED where the next token belongs to another document
    order: torch.Tensor  # (b, T) int64, or (1, T) in layout "plain"; so are the next two
    position: torch.Tensor  # float64 where positions are drawn as reals
    document: torch.Tensor
    layout: str  # "plain" | "packed"
    reach: int  # 1 + largest position, rounded up
    unit_steps: bool  # positions of neighbours in one document differ by one
    n_targets: int  # counted targets of the whole step, over all ranks
    epoch: int  # of the step's first window
    hash: str  # 16 hex digits of the whole step's tokens and targets; "" on ranks other than 0


class _Line:
    """The documents of one epoch, end to end."""

    def __init__(self, store: Store, seed: int, epoch: int):
        self.store = store
        self.order = permuted(np.arange(store.n_documents), store.n_documents, seed, epoch, "documents")
        self.ends = np.cumsum(store.lengths[self.order])
        self.starts = self.ends - store.lengths[self.order]

    def read(self, start: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens start ... start+n-1 of the line, int64, and which of them begin a document."""
        tokens = np.empty(n, dtype=np.int64)
        begins = np.zeros(n, dtype=bool)
        slot, filled = int(np.searchsorted(self.ends, start, side="right")), 0
        while filled < n:
            offset = start + filled - int(self.starts[slot])
            part = self.store.document(int(self.order[slot]))[offset : offset + n - filled]
            tokens[filled : filled + len(part)] = part
            begins[filled] = offset == 0
            filled += len(part)
            slot += 1
        return tokens, begins


class Batches:
    """Windows of `train_length` tokens of a store, `batch_size` of them a step over all ranks."""

    def __init__(
        self,
        store: Store,
        *,
        packing: str,
        train_length: int,
        batch_size: int,
        seed: int,
        positions: PlainPositions = PLAIN,
    ):
        if packing not in PACKINGS:
            raise DataError(f"data.packing={packing!r} is unknown; known are {', '.join(PACKINGS)}")
        try:
            positions.check(train_length)
        except ValueError as error:
            raise DataError(str(error)) from None
        self.store, self.packing, self.positions, self.seed = store, packing, positions, seed
        self.train_length, self.batch_size = train_length, batch_size
        self.n_windows = (store.n_tokens - 1) // train_length  # an epoch drops up to T tokens at its end
        if self.n_windows < 1:
            raise DataError(
                f"{store.folder} holds {store.n_tokens:,} tokens, fewer than the {train_length + 1:,} of one "
                "window: shorten train_length or prepare more text"
            )
        self._line = lru_cache(maxsize=2)(
            lambda epoch: _Line(store, seed, epoch)
        )  # a step may span two epochs

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every window was seen once; the last of them may begin the next epoch."""
        return -(-self.n_windows // self.batch_size)

    @property
    def cut_share(self) -> float:
        """Share of the documents that a window's edge cuts in the first epoch."""
        line = self._line(0)
        return float((line.starts // self.train_length != (line.ends - 1) // self.train_length).mean())

    def windows(self, step: int) -> list[tuple[int, int]]:
        """(epoch, window) of each sample of a step, all ranks."""
        return [(epoch, int(w)) for epoch, here in self.windows_by_epoch(step, step + 1) for w in here]

    def windows_by_epoch(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """(epoch, its windows in order) of all samples of steps `start` ... `stop` − 1."""
        first, last = start * self.batch_size, stop * self.batch_size
        for epoch in range(first // self.n_windows, -(-last // self.n_windows)):
            begin = epoch * self.n_windows
            index = np.arange(max(first - begin, 0), min(last - begin, self.n_windows))
            yield epoch, permuted(index, self.n_windows, self.seed, epoch, "windows")

    def document_starts(self, epoch: int) -> np.ndarray:
        """Where each document begins on the line of an epoch, ascending: int64."""
        return self._line(epoch).starts

    def begins(self, step: int) -> np.ndarray:
        """Which inputs of a step begin a document, from lengths alone: (b, T) bool, all ranks."""
        rows = []
        for epoch, window in self.windows(step):
            starts, first = self.document_starts(epoch), window * self.train_length
            low, high = np.searchsorted(starts, (first, first + self.train_length))
            row = np.zeros(self.train_length, dtype=bool)
            row[starts[low:high] - first] = True
            rows.append(row)
        return np.stack(rows)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The rows of `rank` out of `world`; the same whoever asks, whenever."""
        if self.batch_size % world:
            raise DataError(
                f"a batch of {self.batch_size} windows cannot be shared by {world} processes: make it a "
                "multiple of their number"
            )
        windows = self.windows(step)
        share = self.batch_size // world
        mine = slice(rank * share, (rank + 1) * share)
        # The hash is of the whole step, so rank 0 reads all of it: far below the cost of a step.
        tokens, begins = self._read(windows if rank == 0 else windows[mine])
        inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
        if self.packing == "documents":
            targets[begins[:, 1:]] = IGNORED
        digest = ""
        if rank == 0:
            both = hashlib.sha256(np.ascontiguousarray(inputs).tobytes())
            both.update(targets.tobytes())
            digest = both.hexdigest()[:16]
            inputs, targets, begins = inputs[mine], targets[mine], begins[mine]
        rows = np.arange(mine.start, mine.stop)
        placed = place(self.packing, self.positions, begins[:, :-1], seed=self.seed, step=step, rows=rows)
        return Batch(
            tokens=torch.from_numpy(inputs.copy()),
            targets=torch.from_numpy(np.ascontiguousarray(targets)),
            order=torch.from_numpy(placed.order.copy()),
            position=torch.from_numpy(placed.position.copy()),
            document=torch.from_numpy(placed.document.copy()),
            layout=placed.layout,
            reach=1 + max(0, math.ceil(placed.position.max())),
            unit_steps=placed.unit_steps,
            n_targets=self._count_targets(windows),
            epoch=windows[0][0],
            hash=digest,
        )

    def _read(self, windows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """(b, T+1) tokens and document beginnings of these windows."""
        rows = [
            self._line(epoch).read(window * self.train_length, self.train_length + 1)
            for epoch, window in windows
        ]
        return np.stack([tokens for tokens, _ in rows]), np.stack([begins for _, begins in rows])

    def _count_targets(self, windows: list[tuple[int, int]]) -> int:
        """Counted targets of the whole step, from document lengths alone, so that no rank need ask others."""
        count = len(windows) * self.train_length
        if self.packing == "documents":
            for epoch, window in windows:
                starts, first = self._line(epoch).starts, window * self.train_length + 1
                count -= int(
                    np.searchsorted(starts, first + self.train_length) - np.searchsorted(starts, first)
                )
        return count
