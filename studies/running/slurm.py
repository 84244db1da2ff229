"""A SLURM array script for the cells of a study."""

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data.files import write_text
from studies.running.grid import GridCell


def write_array(
    folder: Path, name: str, cells: Sequence[GridCell], command: Sequence[str], options: Sequence[str]
) -> Path:
    """Write `folder`/slurm.sh: one task per cell, each `command --cell INDEX`. `options` are sbatch options
    such as `--partition=gpu`."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --array={indices([cell.index for cell in cells])}",
        f"#SBATCH --output={(folder / 'logs').resolve()}/slurm-%A_%a.log",
        "#SBATCH --signal=B:INT@120",  # save a checkpoint two minutes before the time limit
        *(f"#SBATCH {option}" for option in options),
        "# One cell per task; `exec` passes the signal on. Submit again to resume interrupted cells.",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        f'exec {shlex.join([sys.executable, *command])} --cell "$SLURM_ARRAY_TASK_ID"',
    ]
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path = folder / "slurm.sh"
    write_text(path, "\n".join(lines) + "\n")
    return path


def indices(numbers: Sequence[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
