"""Score items: the likelihood of every candidate, and exact match of the correct one."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.tasks import TaskItem
from evaluation.scoring.scoring import CellFailed, by_shape
from model import Cache, TokenPositions, Transformer


@dataclass(frozen=True)
class TaskAnswers:
    """Scores of n items with C candidates each, the correct one first.

    nll (n, C) float64: sum over the candidate's tokens, nats. exact (n,): whether greedy decoding
    generates the correct answer.
    """

    nll: np.ndarray
    exact: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """(n,) whether the correct answer is more likely than every other; a tie counts as
        wrong."""
        return self.nll[:, 0] < self.nll[:, 1:].min(axis=1)


Reader = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]
# (prompts (b, P), candidates (b, C, A), declared length) -> NLL (b, C), exact (b,)


class TaskScorer:
    """Prefills a prompt into a cache once, then scores every candidate after it.

    Exact match is teacher-forced: every token of the correct answer is the argmax after the
    previous ones, which is what greedy decoding generates.

    vocab_size: number of ids of the tokenizer; greedy decoding never generates further rows of the
        embedding.
    """

    def __init__(
        self,
        model: Transformer,
        device: str | torch.device = "cpu",
        chunk: int = 4096,
        vocab_size: int | None = None,
    ):
        self.model = model
        self.device = torch.device(device)
        self.chunk = chunk
        self.vocab_size = vocab_size

    @torch.no_grad()
    def __call__(
        self,
        prompts: np.ndarray,
        candidates: np.ndarray,
        length: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = torch.from_numpy(prompts).to(self.device)
        answers = torch.from_numpy(candidates).to(self.device)
        rows, width = tokens.shape
        cache = self.model.make_cache(rows, width + answers.shape[2] - 1)
        first = tokens
        for start in range(0, width, self.chunk):
            is_last = start + self.chunk >= width
            part = tokens[:, start : start + self.chunk]
            first = self._logits(part, start, length, cache, keep=int(is_last))
        nll = []
        greedy = []
        for answer in answers.unbind(1):
            logits = first
            if answer.shape[1] > 1:
                rest = self._logits(answer[:, :-1], width, length, copy.deepcopy(cache))
                logits = torch.cat([first, rest], dim=1)  # (b, A, V)
            flat = logits.flatten(0, 1).double()
            losses = F.cross_entropy(flat, answer.flatten(), reduction="none")
            nll.append(losses.view(answer.shape).sum(1))
            likeliest = logits[..., : self.vocab_size].argmax(-1)
            greedy.append((likeliest == answer).all(1))
        return torch.stack(nll, dim=1).cpu().numpy(), greedy[0].cpu().numpy()

    def _logits(
        self,
        tokens: Tensor,
        offset: int,
        length: int,
        cache: Cache,
        keep: int | None = None,
    ) -> Tensor:
        positions = TokenPositions.plain(
            tokens.shape[1],
            offset=offset,
            length=length,
            device=self.device,
        )
        return self.model(tokens, positions, cache=cache, keep=keep)


def read_items(
    reader: Reader,
    items: list[TaskItem],
    length: int,
    *,
    bos: int | None,
    batch: int,
    cut: int | None = None,
    after_batch: Callable[[int], None] = lambda items: None,
) -> TaskAnswers:
    """Answers to all items, in their order.

    length: declared length, the inputs of the longest item. cut: number of last inputs that are
    read (context truncated to the trained length). `after_batch(items done)` runs after every
    batch. Raises CellFailed for a loss that is not finite.
    """
    nll = np.empty((len(items), 1 + len(items[0].others)))
    exact = np.zeros(len(items), dtype=bool)
    shapes = np.array([(len(item.prompt), len(item.answer)) for item in items])
    declared = min(length, cut or length)
    for members in by_shape(shapes, batch):
        chosen = [items[i] for i in members]
        prompts = np.array([_prompt(item, bos, cut) for item in chosen], dtype=np.int64)
        candidates = np.array([[item.answer, *item.others] for item in chosen], dtype=np.int64)
        nll[members], exact[members] = reader(prompts, candidates, declared)
        if not np.isfinite(nll[members]).all():
            raise CellFailed(f"the loss is not finite at length {length}")
        after_batch(len(members))
    return TaskAnswers(nll, exact)


def _prompt(item: TaskItem, bos: int | None, cut: int | None) -> list[int]:
    prompt = list(item.prompt) if bos is None else [bos, *item.prompt]
    if cut is None:
        return prompt
    room = max(1, cut - len(item.answer) + 1)
    return prompt[-room:]
