"""Answers of one checkpoint to the items of one task, under every method at every length. No cell
is computed twice.

Exact match is teacher-forced: every token of the answer is the argmax given the tokens before it,
which is equivalent to greedy decoding.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.sampling.packing import IGNORED
from data.tokenizers import SymbolTokenizer
from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import TaskEvaluationSettings
from evaluation.methods import Method, MethodAndLength
from evaluation.scoring.cells import Advance, CellFailed, EvaluationCell, Measurement
from evaluation.scoring.text_loss import by_shape
from evaluation.tasks.drawn_items import DrawnItems, ItemTokens
from model import TokenPositions, Transformer


class BatchScores(NamedTuple):
    """The scores of one batch of items.

    Attributes:
        members: (b,) indices of the items.
        targets: (b, C, A) token ids, or IGNORED.
        nll: (b, C, A) float64 in nats; 0 where the target is IGNORED.
        hits: (b, C, A) whether the target is the most likely token; true where it is IGNORED.
    """

    members: np.ndarray
    targets: Tensor
    nll: Tensor
    hits: Tensor


def score_items(
    model: Transformer,
    items: ItemTokens,
    *,
    length: int,
    batch: int,
    device: torch.device | str = "cpu",
    cut: int | None = None,
    chunk: int = 4096,
    vocab_size: int | None = None,
) -> Iterator[BatchScores]:
    """The scores of all items, in batches of items of equal shape.

    Args:
        length: declared length of all items.
        batch: maximum number of items in one pass.
        cut: read only the last `cut` inputs; None: all.
        chunk: longer prompts are prefilled in chunks of this many tokens.
        vocab_size: number of ids of the tokenizer; greedy decoding never generates ids of further
            rows of the embedding.
    """
    shapes = [
        (len(prompt), *x.shape) for prompt, x in zip(items.prompts, items.inputs, strict=True)
    ]
    for members in by_shape(np.array(shapes), batch):
        prompts, inputs, targets = (
            torch.from_numpy(np.stack([each[i] for i in members])).to(device) for each in items[:3]
        )
        if cut is not None:
            prompts = prompts[:, -max(1, cut - inputs.shape[2]) :]
        if items.placed is None:
            places = TokenPositions.plain(
                inputs.shape[2],
                offset=prompts.shape[1],
                length=length,
                device=device,
            )
        else:
            places = TokenPositions.of_rows(items.placed, members, length)
            places = places.map(lambda x: x.to(device))
        yield BatchScores(
            members,
            targets,
            *score_batch(model, prompts, inputs, targets, places, chunk, vocab_size),
        )


@torch.no_grad()
def score_batch(
    model: Transformer,
    prompts: Tensor,
    inputs: Tensor,
    targets: Tensor,
    places: TokenPositions,
    chunk: int,
    vocab_size: int | None,
) -> tuple[Tensor, Tensor]:
    """`nll` and `hits` of `BatchScores`, from prompts (b, P) and inputs (b, C, A) at `places`. A
    prompt is prefilled into a cache once; every candidate reads a copy of it."""
    rows, width = prompts.shape
    cache = model.make_cache(rows, width + inputs.shape[2]) if width else None
    at_end = []  # the logits after the prompt
    for start in range(0, width, chunk):
        part = prompts[:, start : start + chunk]
        (length,) = places.lengths
        positions = TokenPositions.plain(
            part.shape[1],
            offset=start,
            length=length,
            device=prompts.device,
        )
        keep = int(start + chunk >= width)
        at_end = [model(part, positions, cache=cache, keep=keep)]
    nll = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
    hits = torch.ones(targets.shape, dtype=torch.bool, device=targets.device)
    for candidate in range(targets.shape[1]):
        logits = list(at_end)
        if inputs.shape[2]:
            own = copy.deepcopy(cache)
            logits.append(model(inputs[:, candidate], places, cache=own))
        expected = targets[:, candidate]
        is_target = expected != IGNORED
        expected = expected[is_target]
        scored = torch.cat(logits, dim=1)[is_target]
        nll[:, candidate][is_target] = F.cross_entropy(scored.double(), expected, reduction="none")
        hits[:, candidate][is_target] = scored[:, :vocab_size].argmax(-1) == expected
    return nll, hits


class TaskMeasurement(Measurement):
    """The items of one task, and the answers of one run.

    Raises EvaluationError before any compute for an illegal method or length. A cell whose losses
    are not finite has no answers and is named in `failed`.

    Attributes:
        answers: by (method, length), the numbers of a stored cell, with a row for each item. In
            text: the NLL of every candidate in nats, and whether greedy decoding generates the
            correct one. On symbols: whether all targets are correct, the number of correct answer
            symbols, and the number of answer symbols, both without `<end>`.
    """

    counted = "items"
    caches = 2  # the prompt's cache, and a copy while a candidate is read

    def __init__(
        self,
        settings: TaskEvaluationSettings,
        subject: EvaluatedModel,
        drawn: DrawnItems,
        methods: list[Method],
        facts: dict,
        **environment: Any,
    ):
        if not drawn.in_text:  # without its beginning an item is not a problem of the task
            methods = [method for method in methods if not method.truncates]
        needed = {length: items.positions for length, items in drawn.lengths.items()}
        facts = {"task": drawn.task.name, **facts}
        super().__init__(settings, subject, methods, needed, facts=facts, **environment)
        self.title = f"{drawn.count} items of the task {drawn.task.name}"
        self.drawn = drawn
        self.answers: dict[MethodAndLength, np.ndarray] = self.values_by_role[""]

    def metrics(self, where: MethodAndLength) -> dict[str, np.ndarray]:
        """Metrics that the report averages over the items of a cell, (n,) each; the first is
        compared with chance."""
        values = self.answers[where]
        if self.drawn.in_text:  # a tie is not a correct answer
            right = values[:, 0] < values[:, 1:-1].min(axis=1)
            return {"accuracy": right.astype(float), "exact": values[:, -1]}
        return {"exact": values[:, 0], "symbol_accuracy": values[:, 1] / values[:, 2]}

    def cells(self) -> list[EvaluationCell]:
        return [self._cell(method, length) for method, length in self.places()]

    def _cell(self, method: Method, length: int) -> EvaluationCell:
        drawn = self.drawn.lengths[length]
        inputs = drawn.inputs
        key = self.key(method, inputs) | {"items": drawn.hash}
        if self.drawn.in_text:
            inputs = min(inputs, self.subject.trained_length) if method.truncates else inputs
            key |= {"kind": "tasks", "cut": inputs < drawn.inputs}
        else:
            key |= {"kind": "items"}
        return EvaluationCell(
            method,
            length,
            key,
            inputs=np.full(self.drawn.count, inputs),
            keep=min(inputs, 64) if self.drawn.in_text else inputs,
            chunk=max(1, inputs // 2),
        )

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> np.ndarray:
        drawn = self.drawn.lengths[cell.length]
        inputs = int(cell.inputs[0])
        values = {}
        for scores in score_items(
            model,
            drawn.tokens,
            length=inputs,
            batch=batch,
            device=self.device,
            cut=inputs if inputs < drawn.inputs else None,
            chunk=self.settings.chunk,
            vocab_size=self.drawn.vocab_size,
        ):
            if not torch.isfinite(scores.nll).all():
                raise CellFailed(f"the loss is not finite at length {cell.length}")
            of_items = item_values(scores, self.drawn.in_text)
            values |= dict(zip(scores.members.tolist(), of_items, strict=True))
            advance(len(of_items) / self.drawn.count)
        return np.stack([values[i] for i in range(self.drawn.count)])


def item_values(scores: BatchScores, in_text: bool) -> np.ndarray:
    """The rows (b, k) of a stored cell, as described in `TaskMeasurement`."""
    hits = scores.hits[:, 0]
    exact = hits.all(dim=1)
    if in_text:
        columns = [*scores.nll.sum(dim=2).unbind(1), exact]
    else:
        targets = scores.targets[:, 0]
        is_symbol = (targets != IGNORED) & (targets != SymbolTokenizer.eos_id)
        columns = [exact, (hits & is_symbol).sum(dim=1), is_symbol.sum(dim=1)]
    return torch.stack([column.double() for column in columns], dim=1).cpu().numpy()
