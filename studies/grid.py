"""The grid of a study: expansion into cells, selection and order of cells."""

import fnmatch
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from errors import StudyError
from studies.results.stored import SEED
from studies.study_settings import StudySettings, matches


@dataclass(frozen=True)
class GridCell:
    """One training run and its evaluations. `index` counts the cells, the last axis fastest."""

    index: int
    axes: dict[str, str]
    arguments: tuple[str, ...]  # settings files and overrides of train.py

    @property
    def id(self) -> str:
        """`scheme=rope,seed=0`: also the name of the run directory."""
        return ",".join(f"{axis}={label}" for axis, label in self.axes.items())


def cells_of(study: StudySettings) -> list[GridCell]:
    """All combinations of labels that `skip` does not exclude, in the order of the grid.

    Raises StudyError if there are none.
    """
    cells = []
    for labels in itertools.product(*study.grid.values()):
        axes = dict(zip(study.grid, labels, strict=True))
        if not matches(axes, study.skip):
            arguments = list(study.base)
            for axis, label in axes.items():
                arguments += study.grid[axis][label]
            cells.append(GridCell(len(cells), axes, tuple(arguments)))
    if not cells:
        raise StudyError("skip excludes every cell of the grid; remove an entry")
    return cells


def select_cells(cells: Sequence[GridCell], pattern: str | None) -> list[GridCell]:
    """The cells whose name matches the pattern; StudyError for none."""
    selected = [cell for cell in cells if fnmatch.fnmatchcase(cell.id, pattern or "*")]
    if not selected:
        raise StudyError(f"--only {pattern}: no cell matches; the first cell is {cells[0].id}")
    return selected


def running_order(cells: Sequence[GridCell], study: StudySettings) -> list[GridCell]:
    """Cells of the first seed first, so that an unfinished study can compare all schemes."""
    seeds = list(study.grid.get(SEED, {}))
    return sorted(cells, key=lambda cell: seeds.index(cell.axes[SEED]) if seeds else 0)
