"""List runs: scheme, trained length, tokens, steps, last training and validation loss, status.

    python scripts/runs.py                     everything under runs/
    python scripts/runs.py runs/studies/reading

Validation loss is the loss of the last validation at the trained length, in nats per token. A run is
`done`, `training`, `stopped` (the same command resumes it) or `imported`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from data.files import locked, read_object
from errors import TrainingError
from run_directory.console import Console
from run_directory.metrics_file import last_lines
from run_directory.run import LOCK, MANIFEST, SETTINGS, Run, is_run
from settings.script import Parser, run_main

COLUMNS = ["run", "scheme", "length", "tokens", "steps", "loss", "validation", "status"]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
    )
    folder = parser.parse_args().folder
    runs = [file.parent for file in sorted(folder.rglob(SETTINGS)) if is_run(file.parent)]
    if not runs:
        raise TrainingError(f"{folder} contains no runs; pass the directory of the runs")
    Console().table("", COLUMNS, [row_of(run) for run in runs])
    return 0


def row_of(run: Path) -> list[str]:
    """The cells of one run; if it cannot be read, its status is the reason."""
    try:
        settings = Run(run).settings
        lines = last_lines(run / "metrics.jsonl")
        about = read_object(run / MANIFEST)
    except (ValueError, OSError) as error:
        return [str(run), *[""] * (len(COLUMNS) - 2), str(error).splitlines()[0]]
    train = lines.get("train", {})
    validation = lines.get("validation", {})
    length = settings.train_length
    imported = about.get("data") is None
    step = max((line["step"] for line in lines.values()), default=0)
    original = settings.original_length or length
    schemes = [
        choice.position.describe(length, original)
        for choice in settings.model.resolved_kinds.values()
    ]
    return [
        str(run),
        " | ".join(schemes),
        f"{length:,}",
        "—" if imported else f"{settings.tokens_after(step):,}",
        "—" if imported else f"{step:,}/{settings.steps:,}",
        shown(train.get("loss")),
        shown(validation.get("nll", {}).get(str(length))),
        "imported" if imported else status(run, step, settings.steps),
    ]


def shown(loss: object) -> str:
    return f"{float(loss):.4f}" if isinstance(loss, (int, float, str)) else "—"


def status(run: Path, step: int, steps: int) -> str:
    if (run / LOCK).exists():
        with locked(run / LOCK) as is_free:
            if not is_free:
                return "training"
    return "done" if step >= steps else "stopped"


if __name__ == "__main__":
    run_main(main)
