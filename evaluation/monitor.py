"""NLL at and beyond the trained length while a run trains: a few fixed targets, cheap and always the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from evaluation.protocols import fixed_windows
from evaluation.scoring import ModelScorer, measure
from evaluation.targets import Targets, draw_targets, shorten_lengths, tokens_needed
from evaluation.text import Text
from model import Transformer

LEAST_DOCUMENTS = (
    8  # a length that fewer documents reach is left out: it would choose the targets of all lengths
)


@dataclass(frozen=True)
class MonitorTargets:
    """Fixed spans of a store's documents. `note` says which lengths were left out and why, '' if none."""

    text: Text
    targets: Targets
    lengths: list[int]
    note: str

    def measure(self, model: Transformer, device: torch.device | str = "cpu") -> dict[int, tuple[float, int]]:
        """{length: (mean NLL in nats, counted targets)}; the same numbers bit for bit on a CPU, whenever it
        is called.

        Leaves the model's mode as it was. Raises CellFailed where a loss is not finite.
        """
        out = {}
        for length in self.lengths:
            nll = self.nll(model, length, device)
            out[length] = float(nll.sum() / len(nll)), len(nll)
        return out

    def nll(self, model: Transformer, length: int, device: torch.device | str = "cpu") -> np.ndarray:
        """NLL in nats of every target with `length` tokens of context, (n,) float64."""
        scorer = ModelScorer(model, device=device, length=length)
        windows = fixed_windows(self.targets, length)
        return measure(scorer, self.text, windows, batch=max(1, 4096 // length))


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
    text = Text(store)
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
