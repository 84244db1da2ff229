"""From axes to cells: every combination of labels that is not left out."""

import itertools
from dataclasses import dataclass

from studies.errors import StudyError
from studies.settings import StudySettings, matches
from studies.stored import SEED


@dataclass(frozen=True)
class Cell:
    """One training and its evaluations. `index` counts the cells of the grid, the last axis fastest."""

    index: int
    axes: dict[str, str]
    words: tuple[str, ...]  # of train.py

    @property
    def id(self) -> str:
        """`scheme=rope,seed=0`: also the name of its run folder."""
        return ",".join(f"{axis}={label}" for axis, label in self.axes.items())


def cells_of(settings: StudySettings) -> list[Cell]:
    """All cells in the order of the grid. Raises StudyError where `skip` leaves none."""
    found = []
    for labels in itertools.product(*settings.grid.values()):
        axes = dict(zip(settings.grid, labels, strict=True))
        if matches(axes, settings.skip):
            continue
        words = [word for axis, label in axes.items() for word in settings.grid[axis][label]]
        found.append(Cell(len(found), axes, (*settings.base, *words)))
    if not found:
        raise StudyError("skip leaves no cell of the grid; remove an entry")
    return found


def in_running_order(cells: list[Cell], settings: StudySettings) -> list[Cell]:
    """Every scheme gets its first seed before any gets its second, so that a study that is not finished
    compares what it has."""
    seeds = list(settings.grid.get(SEED, {}))
    return sorted(cells, key=lambda cell: seeds.index(cell.axes[SEED]) if seeds else 0)
