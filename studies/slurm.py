"""A SLURM array over the cells of a study."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data.files import write_text
from studies.grid import Cell

NAME = "slurm.sh"


def write_array(
    folder: Path, name: str, cells: Sequence[Cell], command: Sequence[str], options: Sequence[str]
) -> Path:
    """Write FOLDER/slurm.sh: one task a cell, each `command --cell INDEX`. `options` are sbatch's, as
    `--partition=gpu`."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --array={indices([cell.index for cell in cells])}",
        f"#SBATCH --output={(folder / 'logs').resolve()}/slurm-%A_%a.log",
        "#SBATCH --signal=B:INT@120",  # two minutes before the limit: save, so that the next array goes on
        *(f"#SBATCH {option}" for option in options),
        "# A cell a task; `exec` hands the signal on. Submit again to go on with what was stopped.",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        f'exec {shlex.join([sys.executable, *command])} --cell "$SLURM_ARRAY_TASK_ID"',
    ]
    path = folder / NAME
    write_text(path, "\n".join(lines) + "\n")
    return path


def indices(numbers: Sequence[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
