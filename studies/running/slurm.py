"""A SLURM array script for the cells of a study."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data.files import write_text
from studies.grid import GridCell

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array={array}
#SBATCH --output={logs}/slurm-%A_%a.log
#SBATCH --signal=B:INT@120
{options}# INT: save a checkpoint two minutes before the time limit; `exec` passes it on.
# One cell per task. Submit again to resume interrupted cells.
cd {here} || exit 1
exec {command} --cell "$SLURM_ARRAY_TASK_ID"
"""


def write_array(
    folder: Path,
    name: str,
    cells: Sequence[GridCell],
    command: Sequence[str],
    options: Sequence[str],
) -> Path:
    """Write `folder`/slurm.sh: one task per cell, each `command --cell INDEX`. `options` are sbatch
    options such as `--partition=gpu`."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    text = SCRIPT.format(
        name=name,
        array=",".join(str(cell.index) for cell in cells),
        logs=(folder / "logs").resolve(),
        options="".join(f"#SBATCH {option}\n" for option in options),
        here=shlex.quote(str(Path.cwd())),
        command=shlex.join([sys.executable, *command]),
    )
    write_text(folder / "slurm.sh", text)
    return folder / "slurm.sh"
