"""The order of training data: a pure function of (seed, step).

The documents of an epoch are permuted and concatenated into a token stream. The stream is divided
into windows of T inputs (the last target of a window is the first input of the next), and the
windows are permuted as well. data/sampling/window_order.py assigns samples to texts, and windows to
step ranges where lengths differ. The order does not depend on random state or on the number of
ranks, so a run can resume at any step and on any number of processes.

Where a state is carried, windows are not permuted: row r of a batch of B rows reads the r-th of B
parts of the stream, one window after the other, with the documents and orders of the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from data.files import sha256_of
from data.random_draws import permuted
from data.sampling.positions import (
    IGNORED,
    PACKINGS,
    PLAIN,
    PlainPositions,
    PositionDraws,
    PositionedTokens,
)
from data.sampling.window_order import (
    MixturePattern,
    StepRange,
    StepRanges,
    stream_key,
    window_samplers,
)
from data.store import TokenStore
from data.task_data import SymbolItems
from errors import DataError

TENSORS = ("tokens", "targets", "order", "position", "document")  # of a batch


@dataclass(frozen=True)
class Batch:
    """The part of one step's batch that one rank processes. T is the window length, b the number of
    rows of this rank.
    """

    tokens: torch.Tensor  # (b, T) int64
    targets: torch.Tensor  # (b, T) int64, IGNORED where the next token is in another document
    # (b, T) int64, or (1, T) in layout "plain"; the same for position and document
    order: torch.Tensor
    position: torch.Tensor  # float64 if the positional sampler draws real numbers
    document: torch.Tensor
    layout: str  # "plain" | "packed"
    position_end: int  # 1 + largest position, rounded up
    unit_steps: bool  # positions of neighboring tokens in a document differ by 1
    n_targets: int  # targets included in the loss of the whole step, over all ranks
    epoch: int  # of the first window of the step
    # 16 hex digits, of the tokens and targets of the whole step; "" on ranks other than 0
    hash: str
    # `BatchSampler.passes` after this step, by label; empty without a mixture
    passes: dict[str, float] = field(default_factory=dict)

    def pinned(self) -> "Batch":
        """The batch in page-locked memory, from which copies to a GPU do not block the host."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in TENSORS})


def make_batch(
    inputs: np.ndarray,
    targets: np.ndarray,
    placed: PositionedTokens,
    *,
    n_targets: int,
    hash: str,
    epoch: int,
    passes: dict[str, float],
) -> Batch:
    """The batch of one rank, from its inputs and targets (b, T)."""
    arrays = (inputs, targets, placed.order, placed.position, placed.document)
    return Batch(
        *map(torch.tensor, arrays),
        layout=placed.layout,
        position_end=placed.position_end,
        unit_steps=placed.unit_steps,
        n_targets=n_targets,
        epoch=epoch,
        hash=hash,
        passes=passes,
    )


def content_hash(inputs: np.ndarray, targets: np.ndarray) -> str:
    """16 hex digits of the tokens and targets of a step."""
    return sha256_of(inputs.tobytes() + targets.tobytes())[:16]


def rows_of_rank(batch_size: int, rank: int, world: int) -> slice:
    """The rows of a step that `rank` out of `world` processes. Raises DataError if they do not
    divide equally."""
    if batch_size % world:
        raise DataError(f"the batch size {batch_size} is not a multiple of the {world} processes")
    share = batch_size // world
    return slice(rank * share, (rank + 1) * share)


class TrainingText(NamedTuple):
    """One text of a run. `share` is the fraction of all samples that come from it."""

    store: TokenStore
    share: Fraction = Fraction(1)
    label: str = ""


class _TokenStream:
    """The documents of one epoch of the text `source`, concatenated. Each shard is verified when it
    is first read."""

    def __init__(self, store: TokenStore, source: int, seed: int, epoch: int):
        self.store = store
        self.source = source
        self.epoch = epoch
        key = stream_key(seed, source, epoch, "documents")
        self.order = permuted(np.arange(store.n_documents), store.n_documents, *key)
        lengths = store.lengths[self.order]
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        self._verify = cache(store.verify_tokens)

    def read(self, start: int, n: int) -> np.ndarray:
        """Return tokens start ... start+n-1 of the stream, int64."""
        parts: list[np.ndarray] = []
        slot = int(np.searchsorted(self.ends, start, side="right"))
        while n:
            document = int(self.order[slot])
            self._verify(self.store.shard_of(document))
            offset = max(0, start - int(self.starts[slot]))
            parts.append(self.store.document(document)[offset : offset + n])
            n -= len(parts[-1])
            slot += 1
        return np.concatenate(parts, dtype=np.int64)

    def places(self, start: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order (n,) in their documents of tokens start ... start+n−1, and numbers (n,)
        of the documents, all different over the epochs.
        """
        index = np.arange(start, start + n)
        slot = np.searchsorted(self.starts, index, side="right") - 1
        return index - self.starts[slot], self.epoch * len(self.starts) + slot

    def begins(self, start: int, n: int) -> np.ndarray:
        """Return a mask (n,) bool of tokens start ... start+n−1 that begin a document, without
        reading them.
        """
        low, high = np.searchsorted(self.starts, (start, start + n))
        mask = np.zeros(n, dtype=bool)
        mask[self.starts[low:high] - start] = True
        return mask


class Window(NamedTuple):
    """The location of a sample: a stream, and the offset of the first input in it."""

    stream: _TokenStream
    start: int


class BatchSampler:
    """Computes the windows of each step of a run.

    Args:
        texts: one store, or the texts of a mixture.
        plan: the step ranges of the run, each with a window length, a batch size and a number of
            steps.
        packing: a key of PACKINGS.
        seed: seed of the data order.
        positions: settings of the positional sampler.
        is_carried: rows read consecutive windows. The plan has one step range then, of one text.
    """

    def __init__(
        self,
        texts: TokenStore | Sequence[TrainingText],
        plan: Sequence[StepRange],
        *,
        packing: str,
        seed: int,
        positions: PlainPositions = PLAIN,
        is_carried: bool = False,
    ):
        self.texts = [TrainingText(texts)] if isinstance(texts, TokenStore) else list(texts)
        self.plan = StepRanges(plan)
        self.packing = packing
        self.seed = seed
        self.positions = positions
        self.is_carried = is_carried
        self._pattern = MixturePattern([text.share for text in self.texts])
        self._check()
        self._samplers = []
        for source, text in enumerate(self.texts):
            totals = self._pattern.before(source, np.array(self.plan.samples)).tolist()
            samplers = window_samplers(
                text.store.n_tokens,
                self.plan.lengths,
                totals,
                seed=seed,
                source=source,
            )
            self._samplers.append(samplers)
        # A step may span two epochs of each text.
        self._stream = lru_cache(maxsize=2 * len(self.texts))(self._open_stream)

    def _open_stream(self, source: int, epoch: int) -> _TokenStream:
        return _TokenStream(self.texts[source].store, source, self.seed, epoch)

    def _check(self) -> None:
        for length in self.plan.lengths:
            for text in self.texts:
                rows = self.plan.at(0).batch_size if self.is_carried else 1
                needed = rows * length + 1
                if text.store.n_tokens < needed:
                    raise DataError(
                        f"{text.store.folder} has {text.store.n_tokens:,} tokens, fewer than the "
                        f"{needed:,} of one window per row; decrease train_length or prepare more "
                        "text"
                    )

    def passes(self, done: int) -> dict[str, float]:
        """Number of passes (fractional epochs) over each text after `done` steps, by label."""
        passes = {}
        for source, text in enumerate(self.texts):
            seen = 0
            for part in self.plan.shares(0, done):
                first, stop = self._pattern.before(source, np.array([part.first, part.stop]))
                seen += part.length * int(stop - first)
            passes[text.label] = round(seen / (text.store.n_tokens - 1), 6)
        return passes

    def windows(self, step: int) -> list[Window]:
        """The samples of a step in order."""
        (part,) = self.plan.shares(step, step + 1)
        sample = np.arange(part.first, part.stop)
        if self.is_carried:
            return self._consecutive(sample, part.length)
        source = self._pattern.turns(sample)
        epoch = np.empty_like(sample)
        start = np.empty_like(sample)
        for text in np.unique(source).tolist():
            here = source == text
            index = self._pattern.before(text, sample[here])
            epoch[here], start[here] = self._samplers[text][part.group].locate(index)
        return self._located(source, epoch, start)

    def _consecutive(self, sample: np.ndarray, length: int) -> list[Window]:
        """The windows of samples whose rows read the stream from one window to the next."""
        rows = self.plan.at(0).batch_size
        per_row = (self.texts[0].store.n_tokens - 1) // length // rows
        step, row = np.divmod(sample, rows)
        epoch, number = np.divmod(step, per_row)
        return self._located(np.zeros_like(sample), epoch, (row * per_row + number) * length)

    def _located(self, *places: np.ndarray) -> list[Window]:
        """Windows by text, epoch of that text, and offset of the first input: arrays (n,)."""
        rows = zip(*(place.tolist() for place in places), strict=True)
        return [Window(self._stream(source, epoch), start) for source, epoch, start in rows]

    def _place(
        self,
        windows: list[Window],
        begins: np.ndarray,
        step: int,
        number: np.ndarray,
    ) -> PositionedTokens:
        """Order, positions and documents of the inputs of windows (b,), whose documents begin where
        `begins` (b, T) is true. `number` (b,): their indices in the step."""
        if self.is_carried:
            places = [stream.places(start, begins.shape[1]) for stream, start in windows]
            order, document = np.stack(places, axis=1)
            return PositionedTokens(order, order, document, "packed", True)
        placed = PACKINGS[self.packing](begins)
        draws = PositionDraws(self.seed, step, number[:, None], placed.document)
        return self.positions.apply(placed, draws)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows of `rank` out of `world`. The result depends only on the arguments."""
        windows = self.windows(step)
        mine = rows_of_rank(len(windows), rank, world)
        tokens_per_row = self.plan.at(step).length + 1
        # Computed for the whole step from document lengths, so ranks need no communication.
        begins = np.stack([stream.begins(start, tokens_per_row) for stream, start in windows])
        ignored = begins[:, 1:] & (self.packing == "intra_document")
        # The hash covers the whole step, so rank 0 reads all of it; this costs far less than a
        # step.
        rows = slice(None) if rank == 0 else mine
        tokens = np.stack([stream.read(start, tokens_per_row) for stream, start in windows[rows]])
        inputs = tokens[:, :-1]
        targets = np.where(ignored[rows], IGNORED, tokens[:, 1:])
        digest = ""
        if rank == 0:
            digest = content_hash(inputs, targets)
            inputs = inputs[mine]
            targets = targets[mine]
        return make_batch(
            inputs,
            targets,
            self._place(windows[mine], begins[mine, :-1], step, np.arange(len(windows))[mine]),
            n_targets=int((~ignored).sum()),
            epoch=windows[0].stream.epoch,
            passes=self.passes(step + 1) if len(self.texts) > 1 else {},
            hash=digest,
        )


class ItemSampler:
    """Computes the batch of each step of a run on task items, as `BatchSampler` does for text:
    items are generated as they are needed.

    Args:
        items: those of training.
        plan: the step ranges of the run.
        answers_only: only the tokens of answers are targets.
        seed: seed of random positions.
        positions: settings of the positional sampler.
    """

    def __init__(
        self,
        items: SymbolItems,
        plan: Sequence[StepRange],
        *,
        answers_only: bool,
        seed: int,
        positions: PlainPositions = PLAIN,
    ):
        self.items = items
        self.answers_only = answers_only
        self.plan = StepRanges(plan)
        self.seed = seed
        self.positions = positions
        if min(self.plan.lengths) < items.data.longest or len(self.plan.lengths) > 1:
            raise DataError(
                f"training.stages: every window must have train_length tokens, as items of the "
                f"task {items.task.name} do; remove the lengths of the stages"
            )

    def passes(self, done: int) -> dict[str, float]:
        """No text is repeated."""
        return {}

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows of `rank` out of `world`. The result depends only on the arguments."""
        (part,) = self.plan.shares(step, step + 1)
        index = np.arange(part.first, part.stop)
        mine = rows_of_rank(len(index), rank, world)
        # All ranks generate all items, as the loss is normalized by their number of targets.
        rows = self.items.rows(index, part.length, self.answers_only)
        own = rows.part(mine)
        number = np.arange(len(index))[mine]
        return make_batch(
            own.inputs,
            own.targets,
            own.placed(self.positions, self.seed, step, number),
            n_targets=int((rows.targets != IGNORED).sum()),
            hash=content_hash(rows.inputs, rows.targets) if rank == 0 else "",
            epoch=0,
            passes={},
        )


RunSampler = BatchSampler | ItemSampler
