"""What each layer remembers of the tokens it has seen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.errors import ModelError
from model.position import Places

if TYPE_CHECKING:
    from model.transformer import Transformer


class LayerMemory:
    """Keys and values of one layer, (B, G, capacity, D), written in place."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.filled = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, G, T, D) behind what is there; return all of them (B, G, S, D)."""
        stop = self.filled + k.shape[2]
        self.k[:, :, self.filled : stop] = k
        self.v[:, :, self.filled : stop] = v
        self.filled = stop
        return self.k[:, :, :stop], self.v[:, :, :stop]


class Cache:
    """Full key/value cache of one batch. Places are kept once, not per layer.

    Args:
        model: whose layers are remembered.
        batch: rows.
        capacity: slots per row; a pass that would not fit is refused.
        dtype: of keys and values; by default the weights' own.
    """

    def __init__(self, model: Transformer, batch: int, capacity: int, dtype: torch.dtype | None = None):
        s, weight = model.settings, model.embed.weight
        shape = (batch, s.kv_heads, capacity, s.features)
        self.capacity = capacity
        self.layers = [LayerMemory(shape, dtype or weight.dtype, weight.device) for _ in range(s.layers)]
        self._follows_length = model.follows_length
        self._places: Places | None = None
        self._slots: tuple[
            Tensor, ...
        ] = ()  # order, position, document: (B or 1, capacity), written in place

    @property
    def filled(self) -> int:
        """Slots in use."""
        return 0 if self._places is None else self._places.order.shape[1]

    def advance(self, new: Places) -> Places:
        """Remember where the tokens of the coming pass stand; returns the places of all keys.

        Raises:
            ModelError: no room; another layout or number of rows than before; another declared length than
                before under a rule that follows it, which would leave the remembered keys wrong.
        """
        start, count = self.filled, self.filled + new.order.shape[1]
        if count > self.capacity:
            raise ModelError(f"the cache holds {self.capacity} tokens and {count} were given")
        old, parts = self._places, (new.order, new.position, new.document)
        unit_steps, reach = new.unit_steps, new.reach
        if old is None:
            self._slots = tuple(x.new_empty(x.shape[0], self.capacity) for x in parts)
        else:
            self._check(old, new)
            follows = new.reach - new.order.shape[1] == old.reach  # no jump in position between the passes
            unit_steps = old.unit_steps and new.unit_steps and follows
            reach = max(old.reach, new.reach)
        for slots, x in zip(self._slots, parts, strict=True):
            slots[:, start:count] = x
        order, position, document = (slots[:, :count] for slots in self._slots)
        self._places = replace(
            new, order=order, position=position, document=document, reach=reach, unit_steps=unit_steps
        )
        return self._places

    def _check(self, old: Places, new: Places) -> None:
        if old.layout != new.layout:
            raise ModelError(f"a cache filled in {old.layout} layout cannot go on in {new.layout} layout")
        if old.order.shape[0] != new.order.shape[0]:
            raise ModelError(
                f"a cache begun with {old.order.shape[0]} rows cannot go on with {new.order.shape[0]}"
            )
        if self._follows_length and old.lengths != new.lengths:
            raise ModelError(
                f"the cached keys were made for a declared length of {old.lengths}, now {new.lengths}, and "
                "factor: auto depends on it; declare the final length from the first pass on"
            )
