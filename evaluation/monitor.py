"""NLL at and beyond the trained length during training, on a few fixed targets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evaluation.scoring.scoring import ModelScorer, batches, measure
from evaluation.scoring.scoring import gather as merge
from evaluation.scoring.targets import TargetSet, draw_targets, shorten_lengths, tokens_needed
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import Scorer, fixed_windows
from model import Transformer

# lengths that fewer reach are left out: they would limit the targets of all lengths
LEAST_DOCUMENTS = 8


@dataclass(frozen=True)
class MonitorTargets:
    """Fixed spans of a store's documents. `note` says which lengths were left out and why, '' if
    none."""

    text: EvaluationText
    targets: TargetSet
    lengths: list[int]
    note: str

    @property
    def documents(self) -> int:
        """Number of documents that contain the spans."""
        return len(np.unique(self.targets.document))

    @property
    def hash(self) -> str:
        """Hash of the spans; runs with equal hashes are scored on the same targets."""
        return self.targets.hash

    def measure(
        self,
        model: Transformer,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        gather: Callable[[Any], list[Any]] = lambda mine: [mine],
    ) -> dict[int, tuple[float, int]]:
        """{length: (mean NLL in nats, counted targets)}; the same bits on a CPU for any number of
        processes. NaN for a length at which a loss is not finite.

        Each of the `world` processes calls this with its `rank`; `gather` returns the values of
        all. All pass equally many batches through the model, whose weights may be sharded. The
        model's mode is kept.
        """
        mine = {length: self._share(model, length, device, rank, world) for length in self.lengths}
        parts = gather(mine)
        out = {}
        for length in self.lengths:
            nll = merge([part[length][0] for part in parts])
            finite = all(part[length][1] for part in parts)
            out[length] = float(nll.sum() / len(nll)) if finite else math.nan, len(nll)
        return out

    def nll(
        self, model: Transformer, length: int, device: torch.device | str = "cpu"
    ) -> np.ndarray:
        """NLL in nats of every target with `length` tokens of context, (n,) float64. Raises
        CellFailed if a loss is not finite."""
        scorer = ModelScorer(model, device=device, length=length)
        return measure(
            scorer, self.text, fixed_windows(self.targets, length), batch=rows_of(length)
        )

    def _share(
        self,
        model,
        length: int,
        device,
        rank: int,
        world: int,
    ) -> tuple[np.ndarray, bool]:
        """One rank's NLL of every target, NaN where another owns it, and whether all were
        finite."""
        scorer = _MonitoredLength(ModelScorer(model, device=device, length=length))
        windows = fixed_windows(self.targets, length)
        batch = rows_of(length)
        found = measure(
            scorer,
            self.text,
            windows,
            batch=batch,
            rank=rank,
            world=world,
        )
        shape = batches(windows, batch)
        for _ in range(-(-len(shape) // world) - len(range(rank, len(shape), world))):
            row = shape[0][:1]  # a pass whose result is discarded
            scorer(
                self.text.windows(windows.document[row], windows.end[row], length),
                self.targets.span,
            )
        return found, scorer.finite


def rows_of(length: int) -> int:
    """Spans of one pass."""
    return max(1, 4096 // length)


class _MonitoredLength:
    """A scorer that records non-finite losses and replaces them by 0, so that a scheme that fails
    beyond its trained length does not stop training."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.finite = True

    def __call__(self, windows: np.ndarray, keep: int) -> np.ndarray:
        nll = np.asarray(self.scorer(windows, keep), dtype=np.float64)
        good = np.isfinite(nll)
        self.finite = self.finite and bool(good.all())
        return np.where(good, nll, 0.0)


def monitor_targets(
    store,
    lengths: Sequence[int],
    targets: int = 64,
    spans: int = 32,
    seed: int = 0,
    spans_per_document: int = 1,
) -> MonitorTargets:
    """Draw `spans` spans of `targets` tokens, the same for all `lengths` (input tokens), as stored.

    Lengths that fewer than 8 documents reach (or fewer than reach the shortest length) are left
    out, and `note` says so. Raises EvaluationError where not even the shortest length is reached.
    """
    text = EvaluationText(store)
    span = min(targets, *lengths)
    drawn: dict[str, Any] = {"span": span, "spans_per_document": spans_per_document}
    reaching = int((text.lengths >= tokens_needed(min(lengths), **drawn)).sum())
    least = min(LEAST_DOCUMENTS, max(1, reaching))
    usable, note = shorten_lengths(
        text,
        lengths,
        **drawn,
        least_documents=least,
    )
    documents = max(1, spans // spans_per_document)
    hashes: dict[str, Any] = {"corpus_hash": store.hash, "tokenizer_hash": ""}
    found = draw_targets(
        text, longest=usable[-1], documents=documents, seed=seed, **hashes, **drawn
    )
    return MonitorTargets(text, found, usable, note)
