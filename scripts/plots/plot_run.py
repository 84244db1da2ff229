"""Plot training loss, held-out NLL by length and learning rate over tokens for one or more runs.

    python scripts/plots/plot_run.py runs/quickstart
    python scripts/plots/plot_run.py runs/tiny-* --out figures/tiny.png

Reads metrics.jsonl, also of unfinished runs; if a step was repeated, its last line counts. Writes
PNG, SVG and CSV with the same name.
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # needs no installation

from evaluation.reports.figures import save
from evaluation.reports.report import write_table
from run_directory.console import Console
from run_directory.run_names import names_of
from settings.script import Parser, run_main
from studies.training_figure import differences, read_curves, training_figure


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directory",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="default: training.png in the first run directory",
    )
    options = parser.parse_args()
    out = options.out or options.runs[0] / "training.png"
    runs = [
        read_curves(folder, name)
        for folder, name in zip(options.runs, names_of(options.runs), strict=True)
    ]
    console = Console()
    for reason in differences(runs):
        console.warn(reason)
    out.parent.mkdir(parents=True, exist_ok=True)
    png = save(training_figure(runs), out.parent, out.stem)
    write_table(png.with_suffix(".csv"), pd.concat([run.table for run in runs]))
    for suffix in (".png", ".svg", ".csv"):
        console.info(str(png.with_suffix(suffix)))
    return 0


if __name__ == "__main__":
    run_main(main)
