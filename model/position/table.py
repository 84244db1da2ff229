"""Precomputed tables of position: built once in float64, indexed by position, cast where they are used."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from model.position.places import Places

STRETCHES_KEPT = 16  # tables held at once: documents of many lengths where the stretch follows the length

# positions (any shape, float64) -> tensors whose leading dimensions are those of positions, float64
Rows = Callable[[Tensor], tuple[Tensor, ...]]
Stretch = TypeVar("Stretch", bound=Hashable)


def wide(device: torch.device) -> torch.dtype:
    """The widest float of a device, for what a table cannot hold because it is learned: angles, distances."""
    return torch.float32 if device.type == "mps" else torch.float64


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


class StretchedTables(Generic[Stretch]):
    """A table for each stretch that is asked for; rows of one batch may differ in theirs.

    Args:
        rows: what `Table` takes, for a stretch: a number, or several where it changes several things.
    """

    def __init__(self, rows: Callable[[Stretch], Rows]):
        self._rows = rows
        self._tables: dict[Stretch, Table] = {}

    def _make(self, needed: set[Stretch]) -> None:
        """Drop the oldest tables beyond STRETCHES_KEPT, but none that this pass needs: a batch of more
        lengths would otherwise build every table anew at every step."""
        missing = needed - self._tables.keys()
        for stretch in [stretch for stretch in self._tables if stretch not in needed]:
            if len(self._tables) + len(missing) <= STRETCHES_KEPT:
                break
            del self._tables[stretch]
        for stretch in missing:
            self._tables[stretch] = Table(self._rows(stretch))

    def look_up(self, places: Places, stretches: list[Stretch], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Rows at the positions of `places`, each (B or 1, T, ...); one stretch a row, or one for all."""
        needed = set(stretches)
        self._make(needed)
        if len(needed) == 1:
            return self._tables[stretches[0]].look_up(places.position, places.reach, dtype)
        rows = places.position.expand(len(stretches), -1)
        found = [
            self._tables[s].look_up(rows[b : b + 1], places.reach, dtype) for b, s in enumerate(stretches)
        ]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
