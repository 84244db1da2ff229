"""The grid of a study: expansion into cells, selection and order of cells."""

import fnmatch
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from errors import StudyError
from studies.results.stored import SEED
from studies.settings import StudySettings, matches


@dataclass(frozen=True)
class GridCell:
    """One training run and its evaluations. `index` counts the cells of the grid, the last axis fastest."""

    index: int
    axes: dict[str, str]
    arguments: tuple[str, ...]  # settings files and overrides of train.py

    @property
    def id(self) -> str:
        """`scheme=rope,seed=0`: also the name of the run directory."""
        return ",".join(f"{axis}={label}" for axis, label in self.axes.items())


def cells_of(settings: StudySettings) -> list[GridCell]:
    """All combinations of labels that `skip` does not exclude, in the order of the grid. Raises StudyError if
    there are none."""
    found = []
    for labels in itertools.product(*settings.grid.values()):
        axes = dict(zip(settings.grid, labels, strict=True))
        if not matches(axes, settings.skip):
            own = [one for axis, label in axes.items() for one in settings.grid[axis][label]]
            found.append(GridCell(len(found), axes, (*settings.base, *own)))
    if not found:
        raise StudyError("skip excludes every cell of the grid; remove an entry")
    return found


def select_cells(
    cells: Sequence[GridCell], index: int | None, pattern: str | None
) -> list[GridCell]:
    """The cell of that index, or the cells whose name matches the pattern; raises StudyError for none."""
    if index is not None and not 0 <= index < len(cells):
        raise StudyError(
            f"--cell {index}: the cells are 0 to {len(cells) - 1}; --dry-run lists them"
        )
    if index is not None:
        return [cells[index]]
    found = [cell for cell in cells if fnmatch.fnmatchcase(cell.id, pattern or "*")]
    if not found:
        raise StudyError(f"--only {pattern}: no cell matches; the first cell is {cells[0].id}")
    return found


def running_order(cells: Sequence[GridCell], settings: StudySettings) -> list[GridCell]:
    """Cells of the first seed first, so that an unfinished study can already compare all schemes."""
    seeds = list(settings.grid.get(SEED, {}))
    return sorted(cells, key=lambda cell: seeds.index(cell.axes[SEED]) if seeds else 0)
