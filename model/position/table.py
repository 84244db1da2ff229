"""Precomputed tables of position: built once in float64, indexed by position, cast where they are used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# positions (any shape, float64) -> tensors whose leading dimensions are those of positions, float64
Rows = Callable[[Tensor], tuple[Tensor, ...]]


class Table:
    """Rows for positions 0, 1, 2, ..., grown by doubling when a longer reach is asked for.

    Held outside the state dict and never cast in place, so that `module.to(dtype)` cannot touch it: angles
    in bfloat16 are meaningless after a few hundred positions. Built on the CPU, because not every device has
    float64; the copy each device and dtype needs is made once.
    """

    def __init__(self, rows: Rows):
        self._rows = rows
        self._built = 0
        self._copies: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def look_up(self, position: Tensor, reach: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Rows at `position` (B, T), each (B, T, ...).

        Args:
            position: integers in [0, reach), or reals, for which the rows are computed directly.
            reach: 1 + the largest position, known on the host, so that nothing waits for the device.
            dtype: float64 where the model is, else float32.
        """
        if position.is_floating_point():
            rows = self._rows(position.detach().cpu().double())
            return tuple(row.to(position.device, dtype) for row in rows)
        if reach > self._built:
            self._built = max(reach, 2 * self._built, 512)
            self._copies.clear()
        key = (position.device, dtype)
        if key not in self._copies:
            rows = self._rows(torch.arange(self._built, dtype=torch.float64))
            self._copies[key] = tuple(row.to(position.device, dtype) for row in rows)
        return tuple(row[position] for row in self._copies[key])
