"""Score windows: one NLL per counted target, in batches, in chunks through the cache, over ranks.

`measure` scores the windows of every protocol with any scorer. `ModelScorer` is the scorer of a
Transformer; tests replace it by exact oracles.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from errors import EvaluationError
from evaluation.fixed_targets import measure_windows
from evaluation.scoring.repetition import ControlText
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import Scorer, TargetWindows
from model import ContextShard, TokenPositions, Transformer
from model.devices import to_device

UNIGRAM_TOKENS = 50_000_000  # enough for every frequent token's share to four digits


class CellFailed(EvaluationError):
    """One cell (method × length) cannot be measured; the others continue."""


class ModelScorer:
    """NLL in nats of the last `keep` tokens of each window under `model`, float64 (n, keep).

    `length` is the declared sequence length (it sets `factor: auto`); None: that of the
    inputs. Windows longer than `chunk` are prefilled in chunks through the cache. The head and the
    last layer's queries run only at targets.

    With `shard`, each process of a context group reads its tokens of the windows, layer by layer in
    chunks of `chunk` tokens, and all return the same losses. All of them must be called alike.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        device: str | torch.device = "cpu",
        chunk: int = 4096,
        length: int | None = None,
        shard: ContextShard | None = None,
    ):
        self.model = model
        self.shard = shard
        self.device = torch.device(device)
        self.chunk = chunk
        self.length = length

    # no_grad and not inference_mode: a table that grows here is used again by a training step of
    # the same model.
    @torch.no_grad()
    def __call__(self, windows: np.ndarray, keep: int) -> np.ndarray:
        tokens = to_device(torch.from_numpy(windows), self.device)
        training = self.model.training
        self.model.eval()
        try:
            return self._nll(tokens, keep).double().cpu().numpy()
        finally:
            self.model.train(training)

    def _nll(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        if self.shard is not None:
            return self._shared_nll(tokens, keep, self.shard)
        rows = tokens.shape[0]
        inputs = tokens.shape[1] - 1
        device = self.device
        cache = None
        if inputs > self.chunk:
            half = (
                torch.get_autocast_dtype(device.type)
                if torch.is_autocast_enabled(device.type)
                else None
            )
            cache = self.model.make_cache(rows, inputs, dtype=half)
        # in place: losses kept apart, between the tensors of passes, would fragment the memory
        nll = torch.zeros(rows, keep, dtype=torch.float64, device=device)
        for start in range(0, inputs, self.chunk):
            stop = min(inputs, start + self.chunk)
            here = max(0, stop - max(start, inputs - keep))  # outputs of this chunk that count
            places = TokenPositions.plain(
                stop - start,
                offset=start,
                length=self.length or inputs,
                device=device,
            )
            targets = tokens[:, stop - here + 1 : stop + 1]
            out = self.model(tokens[:, start:stop], places, targets=targets, cache=cache, keep=here)
            done = keep - (inputs - stop)
            nll[:, done - here : done] = out
        return nll

    def _shared_nll(
        self,
        tokens: torch.Tensor,
        keep: int,
        shard: ContextShard,
    ) -> torch.Tensor:
        inputs = tokens.shape[1] - 1
        device = self.device
        shard = shard.divided(inputs, self.chunk)
        places = TokenPositions.plain(
            inputs,
            length=self.length or inputs,
            device=device,
        )
        index = shard.select(torch.arange(inputs, device=device)[None])[0]
        counted = index[index >= inputs - keep]  # the last of this process's tokens
        targets = shard.select(tokens[:, 1:])[:, len(index) - len(counted) :]
        nll = self.model(
            shard.select(tokens[:, :-1]),
            places,
            targets=targets,
            keep=len(counted),
            shard=shard,
        )
        whole = torch.zeros(
            len(tokens),
            keep,
            dtype=torch.float64,
            device=device,
        )
        whole[:, counted - (inputs - keep)] = nll.double()
        return shard.sum(whole)  # of one loss and zeros: exact


def batches(windows: TargetWindows, size: int) -> list[np.ndarray]:
    """Window indices in batches of one shape each, shapes in ascending order, windows in target
    order."""
    return by_shape(np.stack([windows.inputs, windows.keep], axis=1), size)


def by_shape(shapes: np.ndarray, size: int) -> list[np.ndarray]:
    """Indices of equal rows of `shapes` (n, k), at most `size` at a time, rows in ascending
    order."""
    out = []
    for shape in np.unique(shapes, axis=0):
        members = np.flatnonzero((shapes == shape).all(axis=1))
        out += [members[i : i + size] for i in range(0, len(members), size)]
    return out


def measure(
    scorer: Scorer,
    text: EvaluationText | ControlText,
    windows: TargetWindows,
    groups: Sequence[np.ndarray],
    out: np.ndarray | None = None,
    after: Callable[[int], None] = lambda inputs: None,
) -> np.ndarray:
    """NLL in nats of every counted target, (n_targets,) float64 in target order; NaN where no batch
    of `groups` holds its window.

    `out` with losses of an interrupted call is completed. `after(inputs done)` runs after every
    batch. Raises CellFailed at the first non-finite target.
    """
    if out is None:
        out = np.full(windows.n_targets, np.nan)

    def check(members: np.ndarray, nll: np.ndarray) -> None:
        inputs = int(windows.inputs[members[0]])
        finite = np.isfinite(nll).all(axis=1)
        if not finite.all():
            document = int(windows.document[members[finite.argmin()]])
            raise CellFailed(
                f"the loss is not finite at length {inputs}, document {text.store.names[document]}"
            )
        after(inputs * len(members))

    columns = (windows.document, windows.end, windows.inputs, windows.keep)
    measure_windows(scorer, text.windows, np.stack(columns, axis=1), groups, out, check)
    return out


def merge_ranks(parts: list[np.ndarray]) -> np.ndarray:
    """Merge the vectors of the ranks: every target is owned by exactly one of them."""
    stacked = np.stack(parts)
    owned = ~np.isnan(stacked)
    if not (owned.sum(axis=0) == 1).all():
        raise EvaluationError(
            "the ranks' targets overlap or are incomplete; run again with the same settings"
        )
    return np.where(owned, stacked, 0.0).sum(axis=0)


def unigram_nll(train, targets: np.ndarray, vocab_size: int) -> np.ndarray:
    """NLL in nats of every target id (n,) under add-one smoothed token counts of the store `train`,
    (n,) float64.

    BOS and EOS of a document are not counted, as they are never targets. Counting stops after
    50M tokens (whole documents, in stored order).
    """
    counts = np.ones(vocab_size)
    first = int(bool(train.has_bos))
    last = int(bool(train.has_eos))
    for document in range(train.n_documents):
        tokens = train.document(document)
        counts += np.bincount(tokens[first : len(tokens) - last], minlength=vocab_size)
        if counts.sum() >= UNIGRAM_TOKENS:
            break
    return -np.log(counts / counts.sum())[targets]
