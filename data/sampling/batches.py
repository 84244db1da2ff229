"""The order of training data: a pure function of (seed, step).

The documents of an epoch are permuted and concatenated into a token stream. The stream is divided into
windows of T inputs (the last target of a window is the first input of the next), and the windows are permuted
as well. With several sequence lengths, data/sampling/segments.py assigns windows to segments; with several
texts, data/sampling/mixture.py assigns samples to texts. The order does not depend on random state or on the
number of ranks, so a run can resume at any step and on any number of processes.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from data.preparation.groups import TextGroups
from data.sampling.mixture import MixturePattern
from data.sampling.packing import PACKINGS
from data.sampling.random_draws import permuted
from data.sampling.random_positions import PlainPositions, place
from data.sampling.segments import ChunkLayout, Segment, SegmentPlan, stream_key, window_samplers
from data.store import TokenStore
from errors import DataError

PLAIN = PlainPositions()
IGNORED = -100  # excluded from the loss


@dataclass(frozen=True)
class Batch:
    """The part of one step's batch that one rank processes. T is the window length, b the number of rows of
    this rank.
    """

    tokens: torch.Tensor  # (b, T) int64
    targets: torch.Tensor  # (b, T) int64, IGNORED where the next token belongs to another document
    # (b, T) int64, or (1, T) in layout "plain"; the same for position and document
    order: torch.Tensor
    position: torch.Tensor  # float64 if the positional sampler draws real numbers
    document: torch.Tensor
    layout: str  # "plain" | "packed"
    position_end: int  # 1 + largest position, rounded up
    unit_steps: bool  # positions of neighboring tokens in a document differ by 1
    n_targets: int  # targets included in the loss of the whole step, over all ranks
    epoch: int  # of the first window of the step; for text in groups, the index of the token stream
    # 16 hex digits, of the tokens and targets of the whole step; "" on ranks other than 0
    hash: str
    # `BatchSampler.passes` after this step, by label; empty without a mixture
    passes: dict[str, float] = field(default_factory=dict)

    def pinned(self) -> "Batch":
        """The batch in page-locked memory, from which copies to a GPU do not block the host."""
        names = ("tokens", "targets", "order", "position", "document")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})


class TrainingText(NamedTuple):
    """One text of a run. `share` is the fraction of all samples that come from it."""

    store: TokenStore
    share: Fraction = Fraction(1)
    label: str = ""
    groups: TextGroups | None = None  # set if more groups are prepared during training

    def of_epoch(self, epoch: int) -> TokenStore:
        """The token store of an epoch; for text in groups, the store of one group after another."""
        return self.store if self.groups is None else self.groups.store(epoch)

    def n_tokens(self, epoch: int) -> int:
        return self.of_epoch(epoch).n_tokens


class WindowBatch(NamedTuple):
    """The locations of samples, as arrays (n,) int64."""

    length: int
    source: np.ndarray  # index of the text
    epoch: np.ndarray  # of that text
    start: np.ndarray  # offset of the first input in the token stream of that epoch


class _TokenStream:
    """The documents of one epoch, concatenated."""

    def __init__(self, store: TokenStore, source: int, seed: int, epoch: int):
        self.store = store
        key = stream_key(seed, source, epoch, "documents")
        self.order = permuted(np.arange(store.n_documents), store.n_documents, *key)
        self.ends = np.cumsum(store.lengths[self.order])
        self.starts = self.ends - store.lengths[self.order]

    def read(self, start: int, n: int) -> np.ndarray:
        """Return tokens start ... start+n-1 of the stream, int64."""
        parts: list[np.ndarray] = []
        slot = int(np.searchsorted(self.ends, start, side="right"))
        while n:
            offset = max(0, start - int(self.starts[slot]))
            parts.append(self.store.document(int(self.order[slot]))[offset : offset + n])
            n -= len(parts[-1])
            slot += 1
        return np.concatenate(parts, dtype=np.int64)

    def begins(self, start: int, n: int) -> np.ndarray:
        """Return a mask (n,) bool of tokens start ... start+n−1 that begin a document, without
        reading them.
        """
        low, high = np.searchsorted(self.starts, (start, start + n))
        found = np.zeros(n, dtype=bool)
        found[self.starts[low:high] - start] = True
        return found


class BatchSampler:
    """Computes the windows of each step of a run.

    Args:
        texts: one store, or the texts of a mixture.
        plan: the segments of the run, each with a window length, a batch size and a number of steps.
        packing: a key of PACKINGS.
        seed: seed of the data order.
        positions: settings of the positional sampler.
    """

    def __init__(
        self,
        texts: TokenStore | Sequence[TrainingText],
        plan: Sequence[Segment],
        *,
        packing: str,
        seed: int,
        positions: PlainPositions = PLAIN,
    ):
        self.texts = [TrainingText(texts)] if isinstance(texts, TokenStore) else list(texts)
        self.packing = packing
        self.positions = positions
        self.seed = seed
        self.plan, self._pattern = (
            SegmentPlan(plan),
            MixturePattern([text.share for text in self.texts]),
        )
        self._check()
        self._samplers = []
        for i, text in enumerate(self.texts):
            totals = [int(self._pattern.before(i, np.array(n))) for n in self.plan.samples]
            self._samplers.append(
                window_samplers(text.n_tokens, self.plan.lengths, totals, seed, i)
            )
        # A step may span two epochs of each text.
        self._stream = lru_cache(maxsize=2 * len(self.texts))(
            lambda source, epoch: _TokenStream(
                self.texts[source].of_epoch(epoch), source, seed, epoch
            )
        )

    def _check(self) -> None:
        if self.packing not in PACKINGS:
            raise DataError(
                f"data.packing={self.packing!r} is unknown; known are {', '.join(PACKINGS)}"
            )
        for length in self.plan.lengths:
            try:
                self.positions.check(length)
            except ValueError as error:
                raise DataError(str(error)) from None
            for text in self.texts:
                if text.store.n_tokens <= length:
                    raise DataError(
                        f"{text.store.folder} has {text.store.n_tokens:,} tokens, fewer than the "
                        f"{length + 1:,} of one window; decrease train_length or prepare more text"
                    )

    def windows_per_epoch(self, length: int, source: int = 0) -> int:
        """Number of windows of this length in one token stream of a text. Up to `length` tokens at the end of
        the stream are dropped.
        """
        return (self.texts[source].store.n_tokens - 1) // length

    def cut_share(self, length: int) -> float:
        """Fraction of documents that window boundaries split in the first epoch, for windows of
        this length.
        """
        cut = count = 0
        for source in range(len(self.texts)):
            stream = self._stream(source, 0)
            size = ChunkLayout.of(stream.store.n_tokens, [*self.plan.lengths, length]).size
            first, last = (
                at // size * size + at % size // length for at in (stream.starts, stream.ends - 1)
            )
            cut += int((first != last).sum())
            count += len(stream.starts)
        return cut / count

    def passes(self, done: int) -> list[float]:
        """Number of passes (fractional epochs) over each text after `done` steps."""
        seen = [0] * len(self.texts)
        for share in self.plan.shares(0, done):
            for source in range(len(seen)):
                low, high = self._pattern.before(
                    source, np.array([share.first, share.stop])
                ).tolist()
                seen[source] += share.length * (high - low)
        return [n / (text.store.n_tokens - 1) for n, text in zip(seen, self.texts, strict=True)]

    def passes_by_label(self, done: int) -> dict[str, float]:
        """`passes`, keyed by the label of each text."""
        labels = [text.label for text in self.texts]
        return {label: round(n, 6) for label, n in zip(labels, self.passes(done), strict=True)}

    def windows(self, start: int, stop: int) -> Iterator[WindowBatch]:
        """Yield the samples of steps `start` ... `stop` − 1 in order, one segment at a time."""
        for share in self.plan.shares(start, stop):
            sample = np.arange(share.first, share.stop)
            sources = self._pattern.turns(sample)
            epoch = np.empty_like(sample)
            begin = np.empty_like(sample)
            for source in np.unique(sources).tolist():
                here = sources == source
                index = self._pattern.before(source, sample[here])
                epoch[here], begin[here] = self._samplers[source][share.group].locate(index)
            yield WindowBatch(share.length, sources, epoch, begin)

    def is_within(self, step: int, stream: int) -> bool:
        """Whether a step needs no token stream after `stream`, for text in groups. All streams up to `stream`
        must be prepared.
        """
        if self.texts[0].groups is None:
            return True
        (share,) = self.plan.shares(step, step + 1)
        return self._samplers[0][share.group].is_within(share.stop - 1, stream)

    def has_stream(self, stream: int, verify: bool = False) -> bool:
        """Whether a token stream of text in groups is prepared; see `TextGroups.is_ready`."""
        return (groups := self.texts[0].groups) is None or groups.is_ready(stream, verify)

    def groups_used(self, done: int) -> list[str]:
        """Hashes of the groups that the first `done` steps use; empty if the text is not in groups."""
        groups = self.texts[0].groups
        if groups is None or not done:
            return []
        last = max(int(windows.epoch.max()) for windows in self.windows(done - 1, done))
        return groups.used(last + 1)

    def check_groups(self, used: list[str]) -> None:
        """Raise DataError if the current groups differ from `used`."""
        if used and self.texts[0].groups is not None:
            self.texts[0].groups.check(used)

    def preparing(self, here: bool) -> AbstractContextManager:
        """Context manager. If `here`, a subprocess prepares the missing groups of text while the
        block runs.
        """
        groups = self.texts[0].groups
        return groups.preparing() if here and groups is not None else nullcontext()

    def document_starts(self, source: int, epoch: int) -> np.ndarray:
        """Offsets of the documents of a text in the token stream of an epoch, ascending, int64."""
        return self._stream(source, epoch).starts

    def begins(self, step: int) -> np.ndarray:
        """Return a mask (b, T) bool of inputs of a step that begin a document, for all ranks, from document
        lengths alone.
        """
        (found,) = self.windows(step, step + 1)
        return np.stack(
            [stream.begins(start, found.length) for stream, start in self._places(found)]
        )

    def _places(self, windows: WindowBatch) -> list[tuple[_TokenStream, int]]:
        where = zip(
            windows.source.tolist(), windows.epoch.tolist(), windows.start.tolist(), strict=True
        )
        return [(self._stream(source, epoch), start) for source, epoch, start in where]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows of `rank` out of `world`. The result depends only on the arguments."""
        batch_size = self.plan.at(step).batch_size
        if batch_size % world:
            raise DataError(
                f"the batch size {batch_size} is not a multiple of the {world} processes"
            )
        (windows,) = self.windows(step, step + 1)
        share = batch_size // world
        length = windows.length
        places = self._places(windows)
        mine = slice(rank * share, (rank + 1) * share)
        # Computed for the whole step from document lengths alone, so ranks need no communication.
        begins = np.stack([stream.begins(start, length + 1) for stream, start in places])
        ignored = begins[:, 1:] & (self.packing == "intra_document")
        # The hash covers the whole step, so rank 0 reads all of it; this costs far less than a training step.
        rows = slice(None) if rank == 0 else mine
        tokens = np.stack([stream.read(start, length + 1) for stream, start in places[rows]])
        inputs = tokens[:, :-1]
        targets = np.where(ignored[rows], IGNORED, tokens[:, 1:])
        digest = ""
        if rank == 0:
            digest = hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()[:16]
            inputs = inputs[mine]
            targets = targets[mine]
        row = np.arange(batch_size)[mine]
        placed = place(
            self.packing, self.positions, begins[mine, :-1], seed=self.seed, step=step, rows=row
        )
        return Batch(
            tokens=torch.from_numpy(inputs.copy()),
            targets=torch.from_numpy(targets.copy()),
            order=torch.from_numpy(placed.order.copy()),
            position=torch.from_numpy(placed.position.copy()),
            document=torch.from_numpy(placed.document.copy()),
            layout=placed.layout,
            position_end=1 + max(0, math.ceil(placed.position.max())),
            unit_steps=placed.unit_steps,
            n_targets=int((~ignored).sum()),
            epoch=int(windows.epoch[0]),
            passes=self.passes_by_label(step + 1) if len(self.texts) > 1 else {},
            hash=digest,
        )
