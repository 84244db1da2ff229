"""The order in which training sees its text: a pure function of (seed, step).

An epoch's documents are permuted and laid end to end; the line is cut in windows of T inputs (a window's last
target is the next window's first input); the windows are permuted too. Where T changes on the way, or
several texts are mixed, data/windows.py and data/pattern.py say which windows are whose. Neither live random
state nor the number of ranks enters, so a run can be resumed, or shared among more processes, at any step.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from data.draws import permuted
from data.errors import DataError
from data.groups import Groups
from data.pattern import Pattern
from data.positions import PACKINGS, place
from data.settings import PlainPositions
from data.store import Store
from data.windows import Plan, Portion, Slots, courses

PLAIN = PlainPositions()
IGNORED = -100  # a target that is not counted


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step. T = length of its windows, b = rows of this rank."""

    tokens: torch.Tensor  # (b, T) int64
    targets: torch.Tensor  # (b, T) int64, IGNORED where the next token belongs to another document
    order: torch.Tensor  # (b, T) int64, or (1, T) in layout "plain"; so are the next two
    position: torch.Tensor  # float64 where positions are drawn as reals
    document: torch.Tensor
    layout: str  # "plain" | "packed"
    reach: int  # 1 + largest position, rounded up
    unit_steps: bool  # positions of neighbours in one document differ by one
    n_targets: int  # counted targets of the whole step, over all ranks
    epoch: int  # of the step's first window, in its text; of text in groups, the number of the line
    hash: str  # 16 hex digits of the whole step's tokens and targets; "" on ranks other than 0
    passes: dict[str, float] = field(default_factory=dict)  # `Batches.passes` after it; of mixtures alone


class Text(NamedTuple):
    """One text of a run; `share` of all samples are its windows."""

    store: Store
    share: Fraction = Fraction(1)
    label: str = ""
    groups: Groups | None = None  # where more of it is prepared while training goes on

    def line(self, epoch: int) -> Store:
        """What is gone through in an epoch, or, in groups, one after another."""
        return self.store if self.groups is None else self.groups.store(epoch)


class Windows(NamedTuple):
    """Where samples lie: arrays (n,) int64."""

    length: int
    source: np.ndarray  # number of the text
    epoch: np.ndarray  # of that text
    start: np.ndarray  # of the first input on the line of that epoch


class _Line:
    """The documents of one epoch, end to end."""

    def __init__(self, store: Store, source: int, seed: int, epoch: int):
        self.store = store
        key = [seed, epoch, "documents"] + ([f"source {source}"] if source else [])
        self.order = permuted(np.arange(store.n_documents), store.n_documents, *key)
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

    def begins(self, start: int, n: int) -> np.ndarray:
        """Which of the tokens start ... start+n−1 begin a document, without reading them: (n,) bool."""
        low, high = np.searchsorted(self.starts, (start, start + n))
        found = np.zeros(n, dtype=bool)
        found[self.starts[low:high] - start] = True
        return found


class Batches:
    """The windows of each step of a run.

    Args:
        texts: a store, or the texts of a mixture.
        plan: lengths and numbers of windows, portion by portion.
        packing: a key of PACKINGS.
        seed: of the order.
        positions: settings of a sampler of positions.
    """

    def __init__(
        self,
        texts: Store | Sequence[Text],
        plan: Sequence[Portion],
        *,
        packing: str,
        seed: int,
        positions: PlainPositions = PLAIN,
    ):
        if packing not in PACKINGS:
            raise DataError(f"data.packing={packing!r} is unknown; known are {', '.join(PACKINGS)}")
        self.texts = [Text(texts)] if isinstance(texts, Store) else list(texts)
        self.packing, self.positions, self.seed = packing, positions, seed
        self.plan, self._pattern = Plan(plan), Pattern([text.share for text in self.texts])
        self._check()
        totals = [
            [int(self._pattern.before(source, np.array(n))) for n in self.plan.samples]
            for source in range(len(self.texts))
        ]
        self._courses = [
            courses(self._tokens_of(source), self.plan.lengths, totals[source], seed, source)
            for source in range(len(self.texts))
        ]
        # A step may span two epochs of each text.
        self._line = lru_cache(maxsize=2 * len(self.texts))(
            lambda source, epoch: _Line(self.texts[source].line(epoch), source, seed, epoch)
        )

    def _tokens_of(self, source: int) -> Callable[[int], int]:
        return lambda epoch: self.texts[source].line(epoch).n_tokens

    def _check(self) -> None:
        for length in self.plan.lengths:
            try:
                self.positions.check(length)
            except ValueError as error:
                raise DataError(str(error)) from None
            for text in self.texts:
                if text.store.n_tokens <= length:
                    raise DataError(
                        f"{text.store.folder} holds {text.store.n_tokens:,} tokens, fewer than the "
                        f"{length + 1:,} of one window: shorten train_length or prepare more text"
                    )

    def windows_per_epoch(self, length: int, source: int = 0) -> int:
        """Windows of this length on one line of a text; up to `length` tokens at its end are left out."""
        return (self.texts[source].store.n_tokens - 1) // length

    def cut_share(self, length: int) -> float:
        """Share of the documents that an edge of windows of this length cuts in the first epoch."""
        cut = count = 0
        for source in range(len(self.texts)):
            line = self._line(source, 0)
            slot = Slots.of(line.store.n_tokens, [*self.plan.lengths, length]).size
            window = [at // slot * slot + at % slot // length for at in (line.starts, line.ends - 1)]
            cut += int((window[0] != window[1]).sum())
            count += len(line.starts)
        return cut / count

    def passes(self, done: int) -> list[float]:
        """How often each text has been gone through after `done` steps."""
        seen = [0] * len(self.texts)
        for share in self.plan.shares(0, done):
            for source in range(len(seen)):
                low, high = self._pattern.before(source, np.array([share.first, share.stop])).tolist()
                seen[source] += share.length * (high - low)
        return [n / (text.store.n_tokens - 1) for n, text in zip(seen, self.texts, strict=True)]

    def passes_by_label(self, done: int) -> dict[str, float]:
        """`passes` with the label of each text."""
        labels = [text.label for text in self.texts]
        return {label: round(n, 6) for label, n in zip(labels, self.passes(done), strict=True)}

    def windows(self, start: int, stop: int) -> Iterator[Windows]:
        """The samples of steps `start` ... `stop` − 1 in order, portion by portion."""
        for share in self.plan.shares(start, stop):
            sample = np.arange(share.first, share.stop)
            sources = self._pattern.turns(sample)
            epoch, begin = np.empty_like(sample), np.empty_like(sample)
            for source in np.unique(sources).tolist():
                here = sources == source
                index = self._pattern.before(source, sample[here])
                epoch[here], begin[here] = self._courses[source][share.group].locate(index)
            yield Windows(share.length, sources, epoch, begin)

    def lies_in(self, step: int, line: int) -> bool:
        """Whether a step needs no line of text in groups after `line`; those up to it must be there."""
        if self.texts[0].groups is None:
            return True
        (share,) = self.plan.shares(step, step + 1)
        return self._courses[0][share.group].lies_in(share.stop - 1, line)

    def has_line(self, line: int, verify: bool = False) -> bool:
        """Whether a line of text in groups is prepared: `Groups.is_ready`."""
        return (groups := self.texts[0].groups) is None or groups.is_ready(line, verify)

    def groups_used(self, done: int) -> list[str]:
        """Hashes of the groups that the first `done` steps came from; none where text is not in groups."""
        groups = self.texts[0].groups
        if groups is None or not done:
            return []
        last = max(int(windows.epoch.max()) for windows in self.windows(done - 1, done))
        return groups.used(last + 1)

    def check_groups(self, used: list[str]) -> None:
        """Raise DataError where groups are not those that were `used` before."""
        if used and self.texts[0].groups is not None:
            self.texts[0].groups.check(used)

    def preparing(self, here: bool) -> AbstractContextManager:
        """In it, a process started by this one prepares what is missing of text in groups, if `here`."""
        groups = self.texts[0].groups
        return groups.preparing() if here and groups is not None else nullcontext()

    def document_starts(self, source: int, epoch: int) -> np.ndarray:
        """Where each document of a text begins on the line of an epoch, ascending: int64."""
        return self._line(source, epoch).starts

    def begins(self, step: int) -> np.ndarray:
        """Which inputs of a step begin a document, from lengths alone: (b, T) bool, all ranks."""
        (found,) = self.windows(step, step + 1)
        return np.stack([line.begins(start, found.length) for line, start in self._places(found)])

    def _places(self, windows: Windows) -> list[tuple[_Line, int]]:
        where = zip(windows.source.tolist(), windows.epoch.tolist(), windows.start.tolist(), strict=True)
        return [(self._line(source, epoch), start) for source, epoch, start in where]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The rows of `rank` out of `world`; the same whoever asks, whenever."""
        batch_size = self.plan.at(step).batch_size
        if batch_size % world:
            raise DataError(
                f"a batch of {batch_size} windows cannot be shared by {world} processes: make it a "
                "multiple of their number"
            )
        (windows,) = self.windows(step, step + 1)
        places, share = self._places(windows), batch_size // world
        mine = slice(rank * share, (rank + 1) * share)
        # The hash is of the whole step, so rank 0 reads all of it: far below the cost of a step.
        tokens, begins = _read(places if rank == 0 else places[mine], windows.length)
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
            n_targets=self._count_targets(places, windows.length),
            epoch=int(windows.epoch[0]),
            passes=self.passes_by_label(step + 1) if len(self.texts) > 1 else {},
            hash=digest,
        )

    def _count_targets(self, places: list[tuple[_Line, int]], length: int) -> int:
        """Counted targets of the whole step, from document lengths alone, so that no rank need ask others."""
        count = len(places) * length
        if self.packing == "documents":
            count -= sum(int(line.begins(start + 1, length).sum()) for line, start in places)
        return count


def _read(places: list[tuple[_Line, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(b, T+1) tokens and document beginnings of windows."""
    rows = [line.read(start, length + 1) for line, start in places]
    return np.stack([tokens for tokens, _ in rows]), np.stack([begins for _, begins in rows])
