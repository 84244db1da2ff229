"""Split a batch into micro-batches on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from data import Batch
from model import TokenPositions


def token_positions_of(batch: Batch, length: int) -> TokenPositions:
    """The positions of a batch's tokens; `length` is the declared length of every row."""
    return TokenPositions(
        order=batch.order,
        position=batch.position,
        document=batch.document,
        layout=batch.layout,
        reach=batch.reach,
        lengths=(length,),
        unit_steps=batch.unit_steps,
    )


@dataclass(frozen=True)
class MicroBatch:
    """Some of a step's sequences, on the device: (b, T) tokens and targets, and the tokens' positions."""

    tokens: Tensor
    targets: Tensor
    positions: TokenPositions


def micro_batches(batch: Batch, size: int | None, length: int, device: torch.device) -> list[MicroBatch]:
    """Split a batch into groups of at most `size` sequences, moved to the device without waiting."""

    def move(x: Tensor, start: int, stop: int) -> Tensor:
        rows = x if x.shape[0] == 1 else x[start:stop]
        return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows

    count = batch.tokens.shape[0]
    positions, parts = token_positions_of(batch, length), []
    for start in range(0, count, size or count):
        stop = min(start + (size or count), count)
        part = TokenPositions(
            order=move(positions.order, start, stop),
            position=move(positions.position, start, stop),
            document=move(positions.document, start, stop),
            layout=positions.layout,
            reach=positions.reach,
            lengths=positions.lengths,
            unit_steps=positions.unit_steps,
        )
        parts.append(MicroBatch(move(batch.tokens, start, stop), move(batch.targets, start, stop), part))
    return parts
