"""The order of training data: a pure function of (seed, step).

The documents of an epoch are permuted and concatenated into a token stream. The stream is divided
into windows of T inputs (the last target of a window is the first input of the next), and the
windows are permuted as well. data/sampling/window_order.py assigns samples to texts, and windows to
step ranges if lengths differ. The order does not depend on random state or on the number of ranks,
so a run can resume at any step and on any number of processes.

If a state is carried, windows are not permuted: row r of a batch of B rows reads the r-th of B
parts of the stream, one window after the other. Order and document numbers are then those of the
stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from data.files import sha256_of
from data.random_draws import permuted
from data.sampling.packing import IGNORED, PACKINGS, PositionedTokens
from data.sampling.position_samplers import PLAIN, PlainPositions, PositionDraws
from data.sampling.window_order import (
    MixturePattern,
    StepRange,
    samples_before,
    stream_key,
    window_samplers,
)
from data.store import TokenStore
from errors import DataError


@dataclass(frozen=True)
class Batch:
    """The part of one step's batch that one rank processes. T is the window length, b the number of
    rows of this rank.
    """

    tokens: np.ndarray  # (b, T) int64
    targets: np.ndarray  # (b, T) int64, IGNORED where the next token is in another document
    positions: PositionedTokens  # (b, T) or, in layout "plain", (1, T)
    n_targets: int  # targets included in the loss of the whole step, over all ranks
    epoch: int  # epoch of the step's first window
    # 16 hex digits: hash of the tokens and targets of the whole step; "" on ranks other than 0
    hash: str


def content_hash(inputs: np.ndarray, targets: np.ndarray) -> str:
    """Hash of the tokens and targets of a step, 16 hex digits."""
    return sha256_of(inputs.tobytes() + targets.tobytes())[:16]


def rows_of_rank(batch_size: int, rank: int, world: int) -> slice:
    """The rows of a step that `rank` out of `world` processes. Raises DataError if they do not
    divide equally."""
    if batch_size % world:
        raise DataError(f"the batch size {batch_size} is not a multiple of the {world} processes")
    return slice(rank * batch_size // world, (rank + 1) * batch_size // world)


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
        """For tokens start ... start+n−1, return their order (n,) in their documents and the
        numbers (n,) of these documents, which are unique over all epochs.
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
    """A sample: `length` inputs of a stream, from token `start` on, and the target of the last
    input."""

    stream: _TokenStream
    start: int
    length: int


class BatchSampler:
    """Computes the windows of each step of a run.

    Args:
        texts: one store, or the texts of a mixture.
        plan: the step ranges of the run, each with a window length, a batch size and a number of
            steps.
        packing: a key of PACKINGS.
        seed: seed of the data order.
        positions: settings of the positional sampler.
        is_carried: rows read consecutive windows. There must be one text and one step range.
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
        self.plan = plan
        self.packing = packing
        self.seed = seed
        self.positions = positions
        self.is_carried = is_carried
        self._mixture = MixturePattern([text.share for text in self.texts])
        groups = samples_before(plan, sum(step_range.steps for step_range in plan))
        lengths = [group.length for group in groups]
        samples = np.array([group.samples for group in groups])
        self._samplers = []
        for source, text in enumerate(self.texts):
            needed = max(lengths) * (plan[0].batch_size if is_carried else 1) + 1
            if text.store.n_tokens < needed:
                raise DataError(
                    f"{text.store.folder} has {text.store.n_tokens:,} tokens, but one window "
                    f"(with training.state=carry, one per row) requires {needed:,}; decrease "
                    "train_length or prepare more text"
                )
            totals = self._mixture.before(source, samples).tolist()
            self._samplers.append(
                window_samplers(text.store.n_tokens, lengths, totals, seed=seed, source=source)
            )
        # A step may span two epochs of each text.
        self._stream = lru_cache(maxsize=2 * len(self.texts))(self._open_stream)

    def _open_stream(self, source: int, epoch: int) -> _TokenStream:
        return _TokenStream(self.texts[source].store, source, self.seed, epoch)

    def passes(self, steps: int) -> dict[str, float]:
        """Number of passes (fractional epochs) over each text in `steps` steps, by label."""
        groups = samples_before(self.plan, steps)
        passes = {}
        for source, text in enumerate(self.texts):
            samples = self._mixture.before(source, np.array([group.samples for group in groups]))
            tokens = np.array([group.length for group in groups]) @ samples
            passes[text.label] = round(int(tokens) / (text.store.n_tokens - 1), 6)
        return passes

    def windows(self, step: int) -> list[Window]:
        """The samples of a step in order."""
        groups = samples_before(self.plan, step)
        length, batch_size, first = groups[-1]
        if self.is_carried:
            per_row = (self.texts[0].store.n_tokens - 1) // length // batch_size
            epoch, number = divmod(step, per_row)
            stream = self._stream(0, epoch)
            starts = [(row * per_row + number) * length for row in range(batch_size)]
            return [Window(stream, start, length) for start in starts]
        samples = np.arange(first, first + batch_size)
        sources = self._mixture.turns(samples)
        windows: dict[int, Window] = {}
        for source in np.unique(sources).tolist():
            own = samples[sources == source]
            index = self._mixture.before(source, own)
            located = self._samplers[source][len(groups) - 1].locate(index)
            for sample, epoch, start in zip(own.tolist(), *located, strict=True):
                windows[sample] = Window(self._stream(source, int(epoch)), int(start), length)
        return [windows[sample] for sample in samples.tolist()]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows of `rank` out of `world`. The result depends only on the arguments."""
        windows = self.windows(step)
        rows = rows_of_rank(len(windows), rank, world)
        # Computed for the whole step from document lengths, so ranks need no communication.
        begins = np.stack([stream.begins(start, length + 1) for stream, start, length in windows])
        ignored = begins[:, 1:] & (self.packing == "intra_document")
        # The hash covers the whole step, so rank 0 reads all of it; this costs far less than a
        # step.
        read = slice(None) if rank == 0 else rows
        tokens = np.stack(
            [stream.read(start, length + 1) for stream, start, length in windows[read]]
        )
        inputs = tokens[:, :-1]
        targets = np.where(ignored[read], IGNORED, tokens[:, 1:])
        own = rows if rank == 0 else slice(None)
        return Batch(
            inputs[own],
            targets[own],
            self._positions(windows[rows], begins[rows, :-1], step, rows),
            n_targets=int((~ignored).sum()),
            epoch=windows[0].stream.epoch,
            hash=content_hash(inputs, targets) if rank == 0 else "",
        )

    def _positions(
        self, windows: list[Window], begins: np.ndarray, step: int, rows: slice
    ) -> PositionedTokens:
        """Order, positions and documents of the inputs of windows (b,), whose documents begin where
        `begins` (b, T) is true. `rows`: which rows of the step the windows are."""
        if self.is_carried:
            places = [stream.places(start, length) for stream, start, length in windows]
            order, document = np.stack(places, axis=1)
            return PositionedTokens(order, order, document, "packed", True)
        placed = PACKINGS[self.packing](begins)
        number = np.arange(rows.start, rows.stop)[:, None]
        return self.positions.apply(placed, PositionDraws(self.seed, step, number, placed.document))
