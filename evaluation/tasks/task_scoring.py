"""Scores of items: the loss of every candidate, and whether greedy decoding generates the answer.

Exact match is teacher-forced: every token of the answer is the argmax after the previous ones,
which is what greedy decoding generates.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.sampling.item_rows import ItemRows
from data.sampling.positions import IGNORED, PositionedTokens
from data.tasks import TaskItem
from evaluation.scoring.scoring import by_shape
from model import TokenPositions, Transformer


class ItemTokens(NamedTuple):
    """Items as a model reads them. An item in text has C candidates with the same number of tokens,
    the correct one first; an item on symbols has one, which is all of it.

    Attributes:
        prompts: of each item, the tokens that are read once, before all candidates.
        inputs: (C, A) int64 of each item, the tokens that are read of each candidate.
        targets: of each item, the tokens predicted by the end of the prompt and by the inputs,
            (C, A + 1), or (C, A) without a prompt; IGNORED where none is to be predicted.
        placed: positions of the inputs; None: 0, 1, 2, ...
    """

    prompts: Sequence[np.ndarray]
    inputs: Sequence[np.ndarray]
    targets: Sequence[np.ndarray]
    placed: PositionedTokens | None = None


def text_tokens(items: Sequence[TaskItem], bos: int | None) -> ItemTokens:
    """Items in text, of which the prompt is shared by the candidates."""
    begin = [] if bos is None else [bos]
    prompts = [np.array([*begin, *item.prompt]) for item in items]
    candidates = [np.array([item.answer, *item.others]) for item in items]
    return ItemTokens(prompts, [tokens[:, :-1] for tokens in candidates], candidates)


def symbol_tokens(rows: ItemRows, placed: PositionedTokens) -> ItemTokens:
    """Items on symbols, of which every answer is a target."""
    return ItemTokens(rows.inputs[:, :0], rows.inputs[:, None], rows.targets[:, None], placed)


class BatchScores(NamedTuple):
    """Of the `members` of a batch: the targets (b, C, A); their NLL in nats, float64, 0 where they
    are IGNORED; and whether they are the most likely tokens, true where they are IGNORED."""

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
    """The scores of all items, in batches of one shape each.

    Args:
        length: declared length of all items.
        batch: items of one pass.
        cut: number of last inputs that are read.
        chunk: longer prompts are prefilled in chunks of this many tokens.
        vocab_size: number of ids of the tokenizer; greedy decoding never generates further rows of
            the embedding.
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
                inputs.shape[2], offset=prompts.shape[1], length=length, device=device
            )
        else:
            places = token_positions(items.placed, members, length, device)
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
    """`nll` and `hits` of `BatchScores`, from prompts (b, P), and inputs (b, C, A) at `places`. A
    prompt is prefilled into a cache once; every candidate reads a copy of it."""
    rows, width = prompts.shape
    cache = model.make_cache(rows, width + inputs.shape[2]) if width else None
    at_end = []  # the logits after the prompt
    for start in range(0, width, chunk):
        part = prompts[:, start : start + chunk]
        (length,) = places.lengths
        positions = TokenPositions.plain(
            part.shape[1], offset=start, length=length, device=prompts.device
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


def token_positions(
    placed: PositionedTokens,
    rows: np.ndarray,
    length: int,
    device: torch.device | str,
) -> TokenPositions:
    """The positions of some rows; `length` is their declared length."""
    order, position, document = (
        torch.from_numpy(x if len(x) == 1 else x[rows]).to(device)
        for x in (placed.order, placed.position, placed.document)
    )
    return TokenPositions(
        order=order,
        position=position,
        document=document,
        layout=placed.layout,
        position_end=1 + max(0, int(np.ceil(placed.position.max()))),
        lengths=(length,),
        unit_steps=placed.unit_steps,
    )
