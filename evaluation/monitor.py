"""NLL at and beyond the trained length during training, on a few fixed targets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evaluation.scoring.protocols import Scorer, fixed_windows
from evaluation.scoring.scoring import ModelScorer, batches, measure
from evaluation.scoring.scoring import gather as together
from evaluation.scoring.targets import TargetSet, draw_targets, shorten_lengths, tokens_needed
from evaluation.scoring.text import EvaluationText
from model import Transformer

LEAST_DOCUMENTS = (
    8  # lengths that fewer documents reach are left out, as they would limit the targets of all lengths
)


@dataclass(frozen=True)
class MonitorTargets:
    """Fixed spans of a store's documents. `note` says which lengths were left out and why, '' if none."""

    text: EvaluationText
    targets: TargetSet
    lengths: list[int]
    note: str

    @property
    def documents(self) -> int:
        """How many documents the spans are of."""
        return len(np.unique(self.targets.document))

    @property
    def hash(self) -> str:
        """Of every span: numbers of two runs are of the same targets where it is the same."""
        return self.targets.hash

    def measure(
        self,
        model: Transformer,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        gather: Callable[[Any], list[Any]] = lambda mine: [mine],
    ) -> dict[int, tuple[float, int]]:
        """{length: (mean NLL in nats, counted targets)}; the same numbers bit for bit on a CPU, whenever it
        is called and by however many processes. NaN for a length at which a loss is not finite.

        Where `world` processes share the work, each calls this with its `rank`, and `gather` gives every one
        of them what each holds. All of them pass equally many batches through the model, whose weights may
        be in pieces on all of them. Leaves the model's mode as it was.
        """
        mine = {length: self._share(model, length, device, rank, world) for length in self.lengths}
        parts, out = gather(mine), {}
        for length in self.lengths:
            nll = together([part[length][0] for part in parts])
            whole = all(part[length][1] for part in parts)
            out[length] = float(nll.sum() / len(nll)) if whole else math.nan, len(nll)
        return out

    def nll(self, model: Transformer, length: int, device: torch.device | str = "cpu") -> np.ndarray:
        """NLL in nats of every target with `length` tokens of context, (n,) float64. Raises CellFailed where
        a loss is not finite."""
        scorer = ModelScorer(model, device=device, length=length)
        return measure(scorer, self.text, fixed_windows(self.targets, length), batch=rows_of(length))

    def _share(self, model, length: int, device, rank: int, world: int) -> tuple[np.ndarray, bool]:
        """One rank's NLL of every target, NaN where another owns it, and whether all were finite."""
        scorer = _MonitoredLength(ModelScorer(model, device=device, length=length))
        windows = fixed_windows(self.targets, length)
        found = measure(scorer, self.text, windows, batch=rows_of(length), rank=rank, world=world)
        shape = batches(windows, rows_of(length))
        for _ in range(-(-len(shape) // world) - len(range(rank, len(shape), world))):
            row = shape[0][:1]  # a pass whose result is discarded
            scorer(self.text.windows(windows.document[row], windows.end[row], length), self.targets.span)
        return found, scorer.finite


def rows_of(length: int) -> int:
    """Spans of one pass."""
    return max(1, 4096 // length)


class _MonitoredLength:
    """A scorer that records non-finite losses and replaces them by 0, so that a scheme that fails beyond its
    trained length does not stop training."""

    def __init__(self, scorer: Scorer):
        self.scorer, self.finite = scorer, True

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
    """Draw `spans` spans of `targets` tokens, the same for all `lengths` (input tokens), as stored (BOS as
    trained).

    Lengths that fewer than 8 documents reach (or fewer than reach the shortest length) are left out, and
    `note` says so. Raises EvaluationError where not even the shortest length is reached.
    """
    text = EvaluationText(store)
    span = min(targets, *lengths)
    reaching = int((text.lengths >= tokens_needed(min(lengths), span, spans_per_document)).sum())
    usable, note = shorten_lengths(
        text,
        lengths,
        span=span,
        spans_per_document=spans_per_document,
        least_documents=min(LEAST_DOCUMENTS, max(1, reaching)),
    )
    drawn = draw_targets(
        text,
        corpus_hash=store.hash,
        tokenizer_hash="",
        longest=usable[-1],
        span=span,
        documents=max(1, spans // spans_per_document),
        spans_per_document=spans_per_document,
        seed=seed,
    )
    return MonitorTargets(text, drawn, usable, note)
