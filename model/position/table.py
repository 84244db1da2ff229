"""Tables and constants of schemes: computed once in float64, cast on use, not part of the state
dict."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from model.token_positions import TokenPositions

MOST_ROWS = 1 << 15  # rows of a table; further rows are computed in each pass, in constant memory
STRETCHES_KEPT = 16  # maximum number of cached tables, for documents of many lengths

# positions (any shape, float64) -> tensors whose leading dimensions are those of positions,
# float64. Captured tensors are `Constant`s, because positions may be on any device.
Rows = Callable[[Tensor], tuple[Tensor, ...]]
Stretch = TypeVar("Stretch", bound=Hashable)


@contextmanager
def trainable() -> Iterator[None]:
    """Leave inference mode, to create a tensor that is kept: training cannot use inference
    tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@lru_cache(maxsize=256)
def on_device(
    values: tuple[float, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """(N,) the values on a device. The result is cached: copying to a GPU synchronizes."""
    with trainable():
        return torch.tensor(values, dtype=dtype, device=device)


class Constant:
    """A tensor on the CPU and its copies by device and dtype: copying synchronizes with a GPU."""

    def __init__(self, values: Tensor):
        self.values = values
        self._copies: dict[tuple[torch.device, torch.dtype | None], Tensor] = {}

    def to(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        key = (device, dtype)
        if key not in self._copies:
            with trainable():
                self._copies[key] = self.values.to(device, dtype)
        return self._copies[key]


class LookupTable:
    """Rows for positions 0, 1, 2, ...; the table doubles its size as needed.

    Not cast by `module.to(dtype)`: bfloat16 is too coarse for angles after a few hundred positions.
    Tables are computed on the CPU, rows of real positions on their device.
    """

    def __init__(self, rows: Rows):
        self._rows = rows
        self._built = 0
        self._columns: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def look_up(
        self,
        position: Tensor,
        position_end: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Rows at `position` (B, T), each (B, T, ...).

        Args:
            position: integers in [0, position_end), or floats. Rows of floats, and of positions
                that a table would be too large for, are computed directly.
            position_end: 1 + the largest position, on the host, which avoids synchronization.
            dtype: float64 for float64 models, otherwise float32.
        """
        if position.is_floating_point() or position_end > MOST_ROWS:
            rows = self._rows(position.detach().double())
            return tuple(row.to(dtype) for row in rows)
        if position_end > self._built:
            self._built = min(max(position_end, 2 * self._built, 512), MOST_ROWS)
            self._columns.clear()
        key = (position.device, dtype)
        if key not in self._columns:
            with trainable():
                rows = self._rows(torch.arange(self._built, dtype=torch.float64))
                self._columns[key] = tuple(row.to(position.device, dtype) for row in rows)
        return tuple(column[position] for column in self._columns[key])


class StretchedTables(Generic[Stretch]):
    """One table per stretch; the rows of a batch may have different stretches.

    Args:
        rows: returns the `rows` of `LookupTable` for a stretch (a number, or a tuple of numbers).
    """

    def __init__(self, rows: Callable[[Stretch], Rows]):
        # the least recently used table is dropped
        self._table = lru_cache(STRETCHES_KEPT)(lambda stretch: LookupTable(rows(stretch)))

    def look_up(
        self,
        positions: TokenPositions,
        stretches: list[Stretch],
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Rows at `positions`, each (B or 1, T, ...), with one stretch per row or one for all."""
        end = positions.position_end
        if len(set(stretches)) == 1:
            return self._table(stretches[0]).look_up(positions.position, end, dtype)
        rows = positions.position.expand(len(stretches), -1)
        by_row = [
            self._table(stretch).look_up(rows[b : b + 1], end, dtype)
            for b, stretch in enumerate(stretches)
        ]
        return tuple(torch.cat(parts) for parts in zip(*by_row, strict=True))
