"""NLL of a few fixed targets during training: tokens of text at and beyond the trained length, or
the answers of task items."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from data import GeneratedData, RunData
from data.files import canonical_hash
from data.sampling.packing import IGNORED
from data.sampling.position_samplers import PLAIN
from errors import EvaluationError
from evaluation.fixed_target_loss import measure_windows
from evaluation.scoring.evaluation_plan import fixed_windows
from evaluation.scoring.targets import (
    EvaluationText,
    TargetSet,
    draw_targets,
    reaches,
    shorten_lengths,
)
from evaluation.scoring.text_loss import ModelScorer, by_shape, merge_ranks
from evaluation.tasks.drawn_items import ItemTokens, symbol_tokens
from evaluation.tasks.task_session import score_items
from model import Transformer

# a length that fewer documents reach is left out: it would limit the targets of all lengths
LEAST_DOCUMENTS = 8


@dataclass(frozen=True)
class ValidationTargets:
    """Fixed targets at one or more lengths.

    Attributes:
        hash: equal for runs with the same targets.
        documents: number of documents or items that contain the targets.
        share: returns one rank's NLL of every target (n,) from (model, length, device, rank,
            world). Targets of other ranks are NaN. A loss that is not finite is infinite, so that a
            scheme that fails beyond its trained length does not stop training.
        note: the lengths that were left out, and why.
    """

    lengths: list[int]
    hash: str
    documents: int
    share: Callable[..., np.ndarray]
    note: str = ""

    def measure(
        self,
        model: Transformer,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        gather: Callable[[Any], list[Any]] = lambda mine: [mine],
    ) -> dict[int, tuple[float, int]]:
        """{length: (mean NLL in nats, number of targets)}; NaN if a loss at this length is not
        finite. On a CPU, bitwise equal for any number of processes.

        Each of the `world` processes calls this with its `rank`; `gather` returns the values of all
        processes. All pass equally many batches through the model, whose weights may be sharded.
        The model's train or eval mode is kept.
        """
        mine = {length: self.share(model, length, device, rank, world) for length in self.lengths}
        parts = gather(mine)
        out = {}
        for length in self.lengths:
            nll = merge_ranks([part[length] for part in parts])
            mean = float(nll.sum() / len(nll)) if np.isfinite(nll).all() else math.nan
            out[length] = mean, len(nll)
        return out


def text_nll(
    text: EvaluationText,
    targets: TargetSet,
    model: Transformer,
    length: int,
    device: torch.device | str,
    rank: int,
    world: int,
) -> np.ndarray:
    """A rank's share of the NLL of fixed spans of documents."""
    scorer = ModelScorer(model, device=device, length=length)
    windows = fixed_windows(targets, length)
    groups = by_shape(windows[:, 2:], rows_of(length))
    own = groups[rank::world]
    nll = np.full(len(windows) * targets.span, np.nan)

    def nll_of(tokens: np.ndarray, keep: int) -> np.ndarray:
        losses = scorer(tokens, keep)
        return np.where(np.isfinite(losses), losses, np.inf)

    measure_windows(nll_of, text.windows, windows, own, nll)
    if len(own) * world < len(groups):  # one batch fewer: add one and discard it
        scorer(text.windows(targets.document[:1], targets.end[:1], length), targets.span)
    return nll


def item_nll(
    items: ItemTokens,
    model: Transformer,
    length: int,
    device: torch.device | str,
    rank: int,
    world: int,
) -> np.ndarray:
    """The NLL of the answers of task items. Every rank reads all items, and rank 0 owns all
    targets."""
    scored = score_items(model, items, length=length, batch=rows_of(length), device=device)
    parts = [scores.nll[scores.targets != IGNORED] for scores in scored]
    nll = torch.cat(parts).cpu().numpy()
    if rank != 0:
        return np.full(len(nll), np.nan)
    return np.where(np.isfinite(nll), nll, np.inf)


def rows_of(length: int) -> int:
    """Number of spans in one pass."""
    return max(1, 4096 // length)


def monitor_targets(
    data: RunData,
    lengths: Sequence[int],
    targets: int,
    spans: int,
    seed: int,
) -> ValidationTargets:
    """The targets of a run's validation: spans of held-out text, drawn by `text_targets`, or the
    answers of `spans` items at positions 0, 1, 2, ..., or at the positions of the task."""
    if not isinstance(data, GeneratedData):
        return text_targets(data.valid, lengths, targets, spans, seed)
    index = np.arange(spans)
    rows = data.items("validation", seed).rows(index, data.longest)
    tokens = symbol_tokens(rows, rows.placed(PLAIN, seed, 0, index))
    return ValidationTargets(
        lengths=[data.longest],
        hash=canonical_hash([data.valid_hash, spans, seed]),
        documents=spans,
        share=partial(item_nll, tokens),
    )


def text_targets(
    store,
    lengths: Sequence[int],
    targets: int = 64,
    spans: int = 32,
    seed: int = 0,
) -> ValidationTargets:
    """Draw `spans` spans of `targets` tokens, each in a different document; the same for all
    `lengths` (input tokens).

    Lengths that fewer than 8 documents reach (or fewer than reach the shortest length) are left
    out, and `note` says so. Raises EvaluationError if no document reaches the shortest length.
    """
    text = EvaluationText(store)
    span = min(targets, *lengths)
    room = reaches(text, span, 1)
    reaching = int((room >= min(lengths)).sum())
    if reaching == 0:
        raise EvaluationError(
            f"none of {len(room)} held-out documents has more than {min(lengths)} tokens, for "
            f"validation; the longest usable length is {max(0, int(room.max(initial=0)))}: lower "
            "train_length or hold out longer documents"
        )
    usable, note = shorten_lengths(room, lengths, min(LEAST_DOCUMENTS, reaching))
    drawn = draw_targets(
        text,
        tokenizer_hash="",
        longest=usable[-1],
        span=span,
        documents=spans,
        spans_per_document=1,
        seed=seed,
    )
    return ValidationTargets(
        lengths=usable,
        hash=drawn.hash,
        documents=len(np.unique(drawn.document)),
        share=partial(text_nll, text, drawn),
        note=note,
    )
