"""A cache of fixed size: every key has a slot that never moves, and the position of a pass is a
tensor.

Shapes and addresses are the same in every pass of one token, so a GPU can record the pass as a
graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Cache, CacheIndex, LayerCache
from model.mixers.layer_state import LayerState
from model.token_positions import TokenPositions

BUCKET = 256  # slots and passes are rounded up to a multiple of this
EMPTY = -2  # document of a slot without a key; −1 is padding


def rounded(count: int) -> int:
    """`count`, rounded up to a multiple of BUCKET."""
    return -(-count // BUCKET) * BUCKET


class StaticIndex:
    """Positions of the keys of one layer kind in slots that never move, and the slot of each pass.

    The slots are those of `source`, one for each pass, and empty ones. With a window, the passes
    write to as many slots in turn, after those of the first `sinks` passes.

    Attributes:
        slot: (1,) slot of the current pass.
        positions: of the keys in all slots.
    """

    def __init__(
        self,
        source: CacheIndex,
        passes: int,
        window: int | None,
        end: int,
    ):
        stored = source.positions
        assert stored is not None
        filled = stored.order.shape[1]
        device = stored.order.device
        at = torch.arange(rounded(passes), device=device).clamp(max=passes - 1)
        if window is not None:
            sinks = source.sinks
            at = torch.where(at < sinks, at, sinks + (at - sinks) % window)
            passes = min(passes, sinks + window)
        self.slots = rounded(filled + passes)
        self._slot_of = filled + at
        self.slot = self._slot_of[:1].clone()
        room = (0, self.slots - filled)
        self.positions = TokenPositions(
            order=F.pad(stored.order, room),
            position=F.pad(stored.position, room),
            document=F.pad(stored.document, room, value=EMPTY),
            layout="ragged",
            position_end=end,
            lengths=(end,),
            unit_steps=False,
        )

    def write(self, at: Tensor, new: TokenPositions) -> TokenPositions:
        """Store the position of the pass `at` (1,); returns those of all slots."""
        self.slot.copy_(self._slot_of.index_select(0, at))
        self.positions.order.index_copy_(1, self.slot, new.order)
        self.positions.position.index_copy_(1, self.slot, new.position)
        self.positions.document.index_copy_(1, self.slot, new.document)
        return self.positions


class StaticLayerCache(LayerCache):
    """Keys and values of one layer, written at the slot of the current pass. It takes over the
    buffers of `source`."""

    def __init__(self, source: LayerCache, index: StaticIndex):
        super().__init__(source.index, source.dtype)
        self._static = index
        self._stored = source._stored
        self.mark()
        for name, filled in source._filled.items():
            stored = source._buffers.pop(name)[:, :, :filled]
            # Zeros: empty slots are masked, but NaN times a weight of 0 would still be NaN.
            self._buffers[name] = F.pad(stored, (0, 0, 0, index.slots - filled))

    def _append(self, name: str, x: Tensor) -> Tensor:
        return self._buffers[name].index_copy_(2, self._static.slot, x)


class StaticCache:
    """A cache with slots for `passes` more tokens, which takes over the keys of `source`.

    Args:
        kinds: the kind of each layer.
        windows: by layer kind, how many tokens back a query attends to; None: all.
        end: `position_end` of all passes.

    Attributes:
        at: (1,) index of the current pass.
    """

    def __init__(
        self,
        source: Cache,
        kinds: list[str],
        passes: int,
        windows: dict[str, int | None],
        end: int,
    ):
        assert source.last is not None
        self.kinds = source.kinds
        self.indices = {
            kind: StaticIndex(index, passes, windows[kind], end)
            for kind, index in source.indices.items()
        }
        self.layers = [
            layer.static()
            if isinstance(layer, LayerState)
            else StaticLayerCache(layer, self.indices[kind])
            for layer, kind in zip(source.layers, kinds, strict=True)
        ]
        self.at = torch.zeros(1, dtype=torch.int64, device=source.last.order.device)

    def restart(self) -> None:
        """Undo all passes: the next ones overwrite the slots of their keys."""
        self.at.zero_()
        for layer in self.layers:
            layer.restart()

    def advance(self, new: TokenPositions) -> dict[str, TokenPositions]:
        """Add the token of the current pass; returns the positions of all slots by layer kind."""
        keys = dict.fromkeys(self.kinds, new)
        return keys | {kind: index.write(self.at, new) for kind, index in self.indices.items()}
