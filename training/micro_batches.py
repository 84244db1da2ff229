"""Split a batch into micro-batches on the device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data import Batch
from model import ContextShard, TokenPositions
from model.devices import to_device


def token_positions_of(batch: Batch, length: int) -> TokenPositions:
    """The positions of a batch's tokens; `length` is the declared length of every row."""
    return TokenPositions(
        order=batch.order,
        position=batch.position,
        document=batch.document,
        layout=batch.layout,
        position_end=batch.position_end,
        lengths=(length,),
        unit_steps=batch.unit_steps,
    )


@dataclass(frozen=True)
class MicroBatch:
    """Some of a step's sequences, on the device.

    Attributes:
        tokens, targets: (b, T), or (b, T / N) if a context group of N ranks shares the sequences.
        positions: of whole sequences.
        shard: this rank's part of the sequences; None: all.
    """

    tokens: Tensor
    targets: Tensor
    positions: TokenPositions
    shard: ContextShard | None = None


def micro_batches(
    batch: Batch,
    size: int | None,
    length: int,
    device: torch.device,
    shard: ContextShard | None = None,
) -> list[MicroBatch]:
    """Split a batch into groups of at most `size` sequences, moved to the device without waiting."""
    count = batch.tokens.shape[0]
    size = size or count

    def move(x: Tensor, start: int) -> Tensor:
        return to_device(x if x.shape[0] == 1 else x[start : start + size], device)

    def part(start: int) -> MicroBatch:
        tensors = ("order", "position", "document")
        moved = {name: move(getattr(positions, name), start) for name in tensors}
        return MicroBatch(
            move(tokens, start), move(targets, start), replace(positions, **moved), shard
        )

    positions = token_positions_of(batch, length)
    tokens = batch.tokens
    targets = batch.targets
    if shard is not None:
        tokens = shard.select(tokens)
        targets = shard.select(targets)
    return [part(start) for start in range(0, count, size)]
