"""Decoding: passes of one token per row after a prompt.

`make_decoder` chooses one of three decoders, which map tokens to logits:

- `PlannedDecoder` (`planned.py`): plans several passes together, for small models on a CPU;
- `StaticDecoder` (`static.py`): repeats the same operations in every pass, recorded as a CUDA graph
  on a GPU;
- `GrowingDecoder`: any passes, with keys in a growing cache.

All of them compute with the packed blocks of `packed.py`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from model.cache import Cache
from model.decoding.packed import PackedModel, is_transposed, pack
from model.decoding.planned import PlannedDecoder
from model.decoding.static import LEAST_PASSES, StaticDecoder
from model.token_positions import TokenPositions
from model.transformer import Transformer

__all__ = ["make_decoder", "pack"]


def make_decoder(
    model: Transformer,
    cache: Cache,
    positions: TokenPositions,
    static: bool | None = None,
    is_compiled: bool = False,
) -> Callable[[Tensor], Tensor]:
    """A function from the next tokens (B,) to the logits (B, V) after them.

    Args:
        model: a model in evaluation mode. See `pack`.
        cache: cache of the preceding tokens, which only the decoder may use from now on.
        positions: positions of the tokens of all passes; `position_end` is that of the last pass.
        static: use a static cache if all passes are the same operations; None: only on a GPU.
        is_compiled: compile the passes of a static cache.
    """
    device = model.embed.weight.device.type
    # sharded by FSDP2; weights outside the blocks stay gathered between passes
    is_sharded = any(hasattr(weight, "device_mesh") for weight in model.parameters())
    if torch.is_autocast_enabled(device) or not positions.count or is_sharded:
        return GrowingDecoder(model, cache, positions)
    if not is_transposed(model.embed.weight):
        pack(model)  # copies would take the memory again
    first = positions.part(0, 1)
    passes = model.passes(cache.batch, model.prepare(first), dict.fromkeys(model.kinds, first))
    plans = {name: each.plan for name, each in passes.items()}
    is_static = device == "cuda" if static is None else static
    if is_static and positions.count >= LEAST_PASSES:
        return StaticDecoder(model, cache, positions, plans, is_compiled)
    packed = PackedModel(model)
    if static is None and PlannedDecoder.supports(packed, positions, plans):
        return PlannedDecoder(packed, cache, positions)
    return GrowingDecoder(model, cache, positions, packed)


class GrowingDecoder:
    """Passes that append their keys to a growing cache.

    Args:
        packed: the packed model; None if weights cannot be joined: in sharded models, and under
            autocast.
    """

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        positions: TokenPositions,
        packed: PackedModel | None = None,
    ):
        self.model = model
        self.cache = cache
        self.positions = positions
        self.packed = packed
        self._at = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, V) logits after the next tokens (B,)."""
        at = self._at
        self._at += 1
        new = self.positions.part(at, self._at)
        if new.unit_steps:
            end = new.position_end - (self.positions.count - self._at)
            new = replace(new, position_end=end)
        if self.packed is None:
            return self.model(tokens[:, None], new, cache=self.cache, keep=1)[:, -1]
        return self.packed.step(self.model.prepare(new), self.cache, tokens)
