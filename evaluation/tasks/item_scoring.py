"""Answers of a model to task items on symbols: greedy decoding, and the loss of the answers."""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from data.sampling.items import ItemRows
from data.sampling.positions import IGNORED, PositionedTokens
from data.tokenizers import SymbolTokenizer
from model import TokenPositions, Transformer


def token_positions(
    placed: PositionedTokens,
    rows: slice,
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


@torch.no_grad()
def answer_items(
    model: Transformer,
    rows: ItemRows,
    placed: PositionedTokens,
    *,
    length: int,
    batch: int,
    device: torch.device | str = "cpu",
    after_batch: Callable[[int], None] = lambda items: None,
) -> tuple[np.ndarray, np.ndarray]:
    """NLL (n,) in nats, float64, of every target in the order of the rows, and whether it is the
    most likely symbol (n,).

    Where this holds for all targets of an item, greedy decoding generates its answer, because the
    tokens before each target are then those that it generates.

    Args:
        length: declared length of all rows.
        batch: rows of one pass.
        after_batch: called with the number of items of each pass.
    """
    nll = []
    hits = []
    for start in range(0, len(rows.inputs), batch):
        part = slice(start, start + batch)
        inputs = torch.from_numpy(rows.inputs[part]).to(device)
        targets = torch.from_numpy(rows.targets[part]).to(device)
        logits = model(inputs, token_positions(placed, part, length, device))  # (b, T, V)
        is_target = targets != IGNORED
        scored = logits[is_target].double()
        expected = targets[is_target]
        nll.append(F.cross_entropy(scored, expected, reduction="none").cpu().numpy())
        hits.append((scored.argmax(-1) == expected).cpu().numpy())
        after_batch(len(inputs))
    return np.concatenate(nll), np.concatenate(hits)


def by_item(rows: ItemRows, hits: np.ndarray) -> np.ndarray:
    """(n, 3) float64 of each item: whether all targets are right, the number of answer symbols that
    are right, and of answer symbols, both without `<end>`."""
    item, place = np.nonzero(rows.targets != IGNORED)
    n = len(rows.targets)
    symbol = rows.targets[item, place] != SymbolTokenizer.eos_id
    wrong = np.bincount(item, weights=~hits, minlength=n)
    right_symbols = np.bincount(item, weights=hits & symbol, minlength=n)
    symbols = np.bincount(item, weights=symbol, minlength=n)
    return np.stack([wrong == 0, right_symbols, symbols], axis=1).astype(np.float64)
