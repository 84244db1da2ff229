"""Key/value caches, and the states of recurrent mixers.

A layer with a window keeps only the keys that can still be visible: the window and the sinks, in a
buffer that is compacted when it is full. Eviction is by token order, not by slot.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import ModelError
from model.position import Accumulate
from model.token_positions import TokenPositions


def _pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """The slots `index` (B or 1, n) of x along `dim`, row by row; x has B rows, or 1 for all."""
    if index.shape[0] == 1:
        return x.index_select(dim, index[0])
    if x.shape[0] == 1:
        x = x.expand(index.shape[0], *x.shape[1:])
    shape = [1] * x.ndim
    shape[0], shape[dim] = index.shape
    size = list(x.shape)
    size[dim] = index.shape[1]
    return x.gather(dim, index.view(shape).expand(size))


def _selected(positions: TokenPositions | None, rows: Tensor) -> TokenPositions | None:
    """The positions of these rows; tensors that apply to all rows stay as they are."""
    if positions is None:
        return None
    lengths = positions.lengths
    if len(lengths) > 1:
        lengths = tuple(lengths[row] for row in rows.tolist())

    def select(x: Tensor) -> Tensor:
        return x if len(x) == 1 else x.index_select(0, rows.to(x.device))

    return positions.map(select, lengths=lengths)


class CacheIndex:
    """Order, position and document of the cached keys of one layer kind, and the eviction of old
    keys.

    Args:
        capacity: maximum number of tokens in all passes.
        window, sinks: settings of the layer kind.

    Attributes:
        slots: number of keys that each layer's buffer holds, or will hold after it next grows.
        start: slot of the first token of the last pass.
        kept: after a pass whose tokens do not fit, the indices of the keys to store, among all keys
            that the pass attends to; None if they fit.
    """

    def __init__(self, capacity: int, window: int | None, sinks: int):
        self.window = window
        self.sinks = sinks
        self.start = 0
        self.kept: Tensor | None = None
        self.positions: TokenPositions | None = None
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Set the capacity; keys stay where they are."""
        # Later queries attend to window − 1 + sinks keys; twice that makes compaction rare.
        window = self.window
        self.slots = capacity if window is None else min(capacity, 2 * window + self.sinks)
        self.capacity = capacity

    def advance(self, new: TokenPositions) -> TokenPositions:
        """Add the new tokens; returns the positions of all keys of the pass."""
        if new.layout == "packed" and self.sinks:
            # the sinks of all documents stay; only the device knows where they are
            self.slots = self.capacity
        old = self.positions or new.part(0, 0)
        self.start = old.count
        keys = self._joined(old, new)
        self.kept = None
        self.positions = keys
        if self.start + new.count > self.slots:
            self.kept, self.positions = self._compacted(keys)
        return keys

    def _joined(self, old: TokenPositions, new: TokenPositions) -> TokenPositions:
        """Positions of the old keys followed by the new ones."""
        if old.count == 0:
            return new
        # positions continue without a gap
        follows = new.position_end - new.count == old.position_end
        order = torch.cat([old.order, new.order], dim=1)
        position = order
        if old.position is not old.order or new.position is not new.order:
            position = torch.cat([old.position, new.position], dim=1)
        return replace(
            new,
            order=order,
            position=position,
            document=torch.cat([old.document, new.document], dim=1),
            position_end=max(old.position_end, new.position_end),
            unit_steps=old.unit_steps and new.unit_steps and follows,
        )

    def _compacted(self, positions: TokenPositions) -> tuple[Tensor, TokenPositions]:
        """The slots (B or 1, n) that are visible to later queries, and their positions."""
        assert self.window is not None
        filled = positions.count
        device = positions.device
        first = filled - (self.window - 1)
        index = torch.arange(first, filled, device=device)[None]
        hidden = None
        if self.sinks and positions.layout == "plain":
            index = torch.cat([torch.arange(self.sinks, device=device)[None], index], dim=1)
        elif self.sinks:
            # A row's sinks follow its padding. A missing sink, or one inside the window, leaves a
            # slot empty.
            wanted = torch.arange(self.sinks, device=device)[:, None]
            order = torch.where(positions.document >= 0, positions.order, -1)
            is_sink = order[:, None] == wanted  # (B, sinks, filled)
            at = is_sink.int().argmax(-1)
            hidden = ~is_sink.any(-1) | (at >= first)
            index = torch.cat([at, index.expand(len(at), -1)], dim=1)
        unit_steps = positions.unit_steps and not self.sinks
        kept = positions.map(lambda x: _pick(x, index, 1), unit_steps=unit_steps)
        if hidden is not None:
            hidden = F.pad(hidden, (0, self.window - 1))
            kept = replace(kept, document=kept.document.masked_fill(hidden, -1))
        return index, kept


class CachedTail:
    """Features of the last tokens of earlier passes, which a layer keeps; tensors are updated in
    place."""

    def __init__(self):
        self._stored: dict[str, Tensor] = {}

    def extend(self, x: Tensor, count: int, name: str = "inputs") -> Tensor:
        """The features of the last `count` tokens of earlier passes, 0 if there are none, followed
        by the features x (B, T, C) of this pass. Features of different kinds have names."""
        last = self._stored.get(name)
        if last is None:
            last = x.new_zeros(len(x), count, x.shape[2])
        inputs = torch.cat([last, x], dim=1)
        self._store(name, inputs[:, inputs.shape[1] - count :])
        return inputs

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order; tensors that apply to all rows stay."""
        for name, x in self._stored.items():
            if len(x) > 1 or name != "document":
                self._stored[name] = x.index_select(0, rows.to(x.device))

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._stored.values())

    def shapes(self) -> list[tuple]:
        """The name, shape and dtype of each tensor, without the dimension of slots."""
        return [(name, x.shape, x.dtype) for name, x in self._stored.items()]

    def fill(self, source: "CachedTail") -> None:
        """Copy the tensors of `source`, or zeros if it has none, to the tensors of this cache."""
        for name, x in self._stored.items():
            x.zero_()
            if name in source._stored:
                x.copy_(source._stored[name])

    def _store(self, name: str, x: Tensor) -> None:
        stored = self._stored.get(name)
        if stored is None or stored.shape != x.shape:
            self._stored[name] = x.clone()
        else:
            stored.copy_(x)


class LayerCache(CachedTail):
    """Keys, values and extras of one layer, (B, ·, slots, ·), written in place at the slots of
    `index`, and a tail of features."""

    def __init__(self, index: CacheIndex, dtype: torch.dtype):
        super().__init__()
        self.index = index
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, T, ·); returns all of them (B, G, S, ·)."""
        k = self._append("k", k.to(self.dtype))
        v = self._append("v", v.to(self.dtype))
        return k, v

    def extend_extras(
        self,
        features: Tensor,
        accumulate: Accumulate,
        new: TokenPositions,
    ) -> tuple[Tensor, Tensor]:
        """Append the extras of the new tokens, computed from their features (B, T, F); returns them
        (B, T, E) and those of all keys (B, S, E)."""
        own = accumulate(features, self._stored.get("extras"), new)
        if own.shape[1]:
            self._store("extras", own[:, -1:])
        return own, self._append("extras", own[:, None])[:, 0]

    def select_rows(self, rows):
        """Keep these rows of all buffers, in this order."""
        super().select_rows(rows)
        for name, buffer in self._buffers.items():
            self._buffers[name] = buffer.index_select(0, rows.to(buffer.device))

    @property
    def tensors(self):
        return [*super().tensors, *self._buffers.values()]

    def shapes(self):
        buffers = self._buffers.items()
        kept = [(name, *x.shape[:2], x.shape[3], x.dtype) for name, x in buffers]
        return super().shapes() + kept

    def _append(self, name: str, x: Tensor) -> Tensor:
        index = self.index
        start = index.start
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[2] < index.slots:
            # Allocated with the first keys: the cached form of a scheme may be wider than head_dim.
            larger = x.new_empty(*x.shape[:2], index.slots, x.shape[3])
            if buffer is not None:  # the cache has grown
                larger[:, :, : buffer.shape[2]] = buffer
            buffer = self._buffers[name] = larger
        if index.kept is None:
            stop = start + x.shape[2]
            buffer[:, :, start:stop] = x
            self._filled[name] = stop
            return buffer[:, :, :stop]
        everything = torch.cat([buffer[:, :, :start], x], dim=2)
        left = _pick(everything, index.kept, 2)
        buffer[:, :, : left.shape[2]] = left
        self._filled[name] = left.shape[2]
        return everything


class Cache:
    """The growing cache of one batch: keys and values, or the state, of each layer.
    `Transformer.make_cache` creates it.

    Args:
        batch: number of rows.
        capacity: maximum number of tokens per row.
        kinds: names of the layer kinds.
        indices: index of each layer kind whose cache grows with the keys.
        layers: the cache of each layer.
        depends_on_length: cached keys depend on the declared length.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kinds: Sequence[str],
        indices: dict[str, CacheIndex],
        layers: Sequence[Any],
        depends_on_length: bool,
    ):
        self.batch = batch
        self.capacity = capacity
        self.kinds = kinds
        self.indices = indices
        self.layers = list(layers)
        self.filled = 0
        self._depends_on_length = depends_on_length
        self.last: TokenPositions | None = None

    def grow(self, capacity: int) -> None:
        """Raise the capacity to this number of tokens per row."""
        self.capacity = capacity
        for index in self.indices.values():
            index.grow(capacity)

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may occur several times, as in beam search."""
        self.batch = len(rows)
        for layer in self.layers:
            layer.select_rows(rows)
        for index in self.indices.values():
            index.positions = _selected(index.positions, rows)
        self.last = _selected(self.last, rows)

    def next_positions(self, count: int, device: torch.device) -> TokenPositions:
        """The positions of the next `count` tokens, which continue 0, 1, 2, ..."""
        return TokenPositions.plain(count, offset=self.filled, device=device)

    def advance(self, new: TokenPositions) -> dict[str, TokenPositions]:
        """Add the tokens of the next pass; returns the positions of all keys by layer kind; for
        kinds whose cache is a state, the positions of the new tokens only.

        Raises:
            ModelError: the capacity is exceeded; the layout or the number of rows changed; the
                declared length changed and the scheme depends on it, which would invalidate cached
                keys.
        """
        count = self.filled + new.count
        if count > self.capacity:
            raise ModelError(f"the cache has a capacity of {self.capacity} tokens, got {count}")
        old = self.last or new
        if old.layout != new.layout:
            raise ModelError(
                f"a cache filled in {old.layout} layout cannot continue in {new.layout} layout"
            )
        rows = len(old.order)
        new_rows = len(new.order)
        if rows != new_rows:
            raise ModelError(f"a cache created with {rows} rows cannot continue with {new_rows}")
        if self._depends_on_length and old.lengths != new.lengths:
            raise ModelError(
                f"the declared length changed from {old.lengths} to {new.lengths}, and cached "
                "keys depend on it; declare the final length in the first pass"
            )
        self.last = new
        self.filled = count
        keys = dict.fromkeys(self.kinds, new)
        for kind, index in self.indices.items():
            keys[kind] = index.advance(new)
        return keys
