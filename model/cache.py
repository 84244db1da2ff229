"""What each layer remembers of the tokens it has seen.

A layer whose window hides old keys remembers no more than it can still see: the window and the sinks, in a
buffer that is compacted when it is full. Everything is evicted by order, never by slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.errors import ModelError
from model.position import Places
from model.settings import LinearMixer

if TYPE_CHECKING:
    from model.transformer import Transformer


def _pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """The slots `index` (B or 1, n) of x along `dim`, row by row; x has B rows, or 1 that stands for all."""
    if index.shape[0] == 1:
        return x.index_select(dim, index[0])
    if x.shape[0] == 1:
        x = x.expand(index.shape[0], *x.shape[1:])
    shape = [1] * x.ndim
    shape[0], shape[dim] = index.shape
    size = list(x.shape)
    size[dim] = index.shape[1]
    return x.gather(dim, index.view(shape).expand(size))


@dataclass(frozen=True)
class Step:
    """How the layers of one kind take the keys of one pass, decided once for all of them.

    kept: slots that stay, moved to the front first; None: all, where they are.
    start: slot of the first new token, behind what stays.
    after: None where the new tokens fit; else the slots, of what stays and the new ones, that are remembered
        after this pass, which sees all of them.
    """

    kept: Tensor | None
    start: int
    after: Tensor | None


class Shelf:
    """Order, position and document of the keys of one layer kind, and which of them stay.

    Args:
        capacity: tokens the whole cache may be given.
        window, sinks: of the layer kind.
    """

    def __init__(self, capacity: int, window: int | None, sinks: int):
        self.window, self.sinks = window, sinks
        # What later queries can see is window − 1 + sinks; twice that makes compaction rare.
        self.slots = capacity if window is None else min(capacity, 2 * window + sinks)
        self.capacity, self.step = capacity, Step(None, 0, None)
        self.places: Places | None = None
        self._filled = 0

    def advance(self, new: Places) -> Places:
        """Take the new tokens' places; returns those of all keys of the pass."""
        count = new.order.shape[1]
        if new.layout == "packed" and self.sinks and self.window:
            self.slots = self.capacity  # the sinks of every document stay; which, is known on the device only
        old = self.places or new.first(0)
        kept = None
        if self._filled + count > self.slots and self._filled > self._hold:
            kept, old = self._compacted(old)
        start = old.order.shape[1]
        keys = self._joined(old, new)
        after, remembered = None, keys
        if start + count > self.slots:
            after, remembered = self._compacted(keys)
        self.step, self.places, self._filled = Step(kept, start, after), remembered, remembered.order.shape[1]
        return keys

    @property
    def _hold(self) -> int:
        assert self.window is not None
        return self.window - 1 + self.sinks

    def _joined(self, old: Places, new: Places) -> Places:
        """Places of the old keys and the new ones behind them."""
        start = old.order.shape[1]
        if start == 0:
            return new
        follows = new.reach - new.order.shape[1] == old.reach  # no jump in position between the passes
        order, position, document = (
            torch.cat([a, b], dim=1)
            for a, b in (
                (old.order, new.order),
                (old.position, new.position),
                (old.document, new.document),
            )
        )
        return replace(
            new,
            order=order,
            position=position,
            document=document,
            reach=max(old.reach, new.reach),
            unit_steps=old.unit_steps and new.unit_steps and follows,
        )

    def _compacted(self, places: Places) -> tuple[Tensor, Places]:
        """The slots (B or 1, n) that later queries can still see, and their places."""
        assert self.window is not None
        filled, device = places.order.shape[1], places.order.device
        first = filled - (self.window - 1)
        index, hidden = torch.arange(first, filled, device=device)[None], None
        if self.sinks and places.layout == "plain":
            index = torch.cat([torch.arange(self.sinks, device=device)[None], index], dim=1)
        elif self.sinks:
            # A row's sinks stand behind its padding; one missing, or kept anyway, leaves a slot empty.
            wanted = torch.arange(self.sinks, device=device)[None, :, None]
            is_sink = (places.order[:, None] == wanted) & (
                places.document[:, None] >= 0
            )  # (B, sinks, filled)
            at = is_sink.int().argmax(-1)
            hidden = ~is_sink.any(-1) | (at >= first)
            index = torch.cat([at, index.expand(len(at), -1)], dim=1)
        order, position, document = (
            _pick(x, index, 1) for x in (places.order, places.position, places.document)
        )
        if hidden is not None:
            hidden = torch.cat([hidden, hidden.new_zeros(len(hidden), self.window - 1)], dim=1)
            document = document.masked_fill(hidden, -1)
        kept = replace(
            places,
            order=order,
            position=position,
            document=document,
            unit_steps=places.unit_steps and not self.sinks,
        )
        return index, kept


class LayerMemory:
    """Keys, values and notes of one layer, (B, ·, slots, ·), written in place; the shelf says where."""

    def __init__(self, shelf: Shelf, dtype: torch.dtype):
        self.shelf, self.dtype = shelf, dtype
        self._buffers: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, G, T, ·) behind what stays; return all of them (B, G, S, ·)."""
        return self._append("k", k.to(self.dtype)), self._append("v", v.to(self.dtype))

    def notes(self) -> Tensor | None:
        """(B, S, E) notes of the keys remembered so far; None before the first pass."""
        buffer = self._buffers.get("notes")
        return None if buffer is None else buffer[:, 0, : self._filled["notes"]]

    def append_notes(self, new: Tensor) -> Tensor:
        """Write the notes (B, T, E) of the new tokens; return those of all keys (B, S, E)."""
        return self._append("notes", new[:, None])[:, 0]

    def _append(self, name: str, x: Tensor) -> Tensor:
        step, count = self.shelf.step, x.shape[2]
        if name not in self._buffers:
            # Made when the first keys come: what a scheme remembers may be wider than a head.
            shape = (*x.shape[:2], self.shelf.slots, x.shape[3])
            self._buffers[name] = x.new_empty(shape)
            self._filled[name] = 0
        buffer = self._buffers[name]
        if step.kept is not None:
            stays = _pick(buffer[:, :, : self._filled[name]], step.kept, 2)
            buffer[:, :, : step.start] = stays
        stop = step.start + count
        if step.after is None:
            buffer[:, :, step.start : stop] = x
            self._filled[name] = stop
            return buffer[:, :, :stop]
        everything = torch.cat([buffer[:, :, : step.start], x], dim=2)
        left = _pick(everything, step.after, 2)
        buffer[:, :, : left.shape[2]] = left
        self._filled[name] = left.shape[2]
        return everything


@dataclass(frozen=True)
class Sums:
    """Sums over tokens, one for each of M stretches; what a linear layer knows of its past has one.

    Attributes:
        values: (B, G, M, E, D) Σ k vᵀ in the form in which keys are compared.
        keys: (B, G, M, ·) Σ k in the form that is counted in the denominator.
        document: (B or 1, M) the document the tokens belong to; None where there is but one.
    """

    values: Tensor
    keys: Tensor
    document: Tensor | None

    def of(self, start: int, stop: int | None) -> Sums:
        """Some of the stretches."""
        document = None if self.document is None else self.document[:, start:stop]
        return Sums(self.values[:, :, start:stop], self.keys[:, :, start:stop], document)


class LinearMemory:
    """What a layer of linear attention remembers: of fixed size, whatever the number of tokens."""

    def __init__(self):
        self.sums: Sums | None = None

    def keep(self, sums: Sums) -> None:
        """Copied: what is given may be a view of the sums of every chunk of a pass."""
        document = None if sums.document is None else sums.document.clone()
        self.sums = Sums(sums.values.clone(), sums.keys.clone(), document)


class Cache:
    """Key/value cache of one batch. Places are kept once for each layer kind, not per layer.

    Layers of linear attention remember sums in place of keys, and no places.

    Args:
        model: whose layers are remembered.
        batch: rows.
        capacity: tokens per row; a pass that would exceed it is refused.
        dtype: of keys and values; by default the weights' own. Sums are float32 or float64.
    """

    def __init__(self, model: Transformer, batch: int, capacity: int, dtype: torch.dtype | None = None):
        self.capacity, self.batch, self.filled = capacity, batch, 0
        s = model.settings
        self.layers: list[LayerMemory] | list[LinearMemory]
        if isinstance(s.mixer, LinearMixer):
            self._shelves: dict[str, Shelf | None] = dict.fromkeys(s.kinds)
            self.layers = [LinearMemory() for _ in s.layer_kinds]
        else:
            shelves = {kind: Shelf(capacity, choice.window, choice.sinks) for kind, choice in s.kinds.items()}
            self._shelves = {**shelves}
            dtype = dtype or model.embed.weight.dtype
            self.layers = [LayerMemory(shelves[kind], dtype) for kind in s.layer_kinds]
        self._follows_length = model.follows_length
        self._last: Places | None = None

    def advance(self, new: Places) -> dict[str, Places]:
        """Remember where the tokens of the coming pass stand; returns the places of all keys, by layer kind:
        under linear attention those of the coming pass.

        Raises:
            ModelError: no room; another layout or number of rows than before; another declared length than
                before under a rule that follows it, which would leave the remembered keys wrong.
        """
        count = self.filled + new.order.shape[1]
        if count > self.capacity:
            raise ModelError(f"the cache holds {self.capacity} tokens and {count} were given")
        if self._last is not None:
            self._check(self._last, new)
        self._last, self.filled = new, count
        return {kind: shelf.advance(new) if shelf else new for kind, shelf in self._shelves.items()}

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
                "the scheme depends on it; declare the final length from the first pass on"
            )
