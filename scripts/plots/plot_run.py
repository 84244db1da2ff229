"""Plot training loss, held-out NLL by length and learning rate over tokens for one or more runs.

    python scripts/plots/plot_run.py runs/quickstart
    python scripts/plots/plot_run.py runs/tiny-* --out figures/tiny.png

Reads metrics.jsonl, also of unfinished runs; if a step was repeated, its last line counts. Writes
PNG, SVG and CSV with the same name.
"""

from pathlib import Path

import pandas as pd

from evaluation.reports.figures import save
from evaluation.reports.results_files import write_table
from run_directory.console import Console
from run_directory.run_names import names_of
from settings.script import Parser, run_main
from studies.report.training_figure import training_figure
from studies.results.training_curves import differences, read_curves


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
    parser.add_argument(
        "--smooth",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="share of the steps to average over (default: 0.02)",
    )
    options = parser.parse_args()
    if not 0 <= options.smooth <= 1:
        parser.error(f"--smooth must be between 0 and 1, got {options.smooth:g}")
    out = options.out or options.runs[0] / "training.png"
    if out.suffix not in (".png", ".svg", ""):
        parser.error(f"--out {out}: use the suffix .png or none; PNG, SVG and CSV are written")
    names = names_of(options.runs)
    runs = [
        read_curves(folder, name, options.smooth)
        for folder, name in zip(options.runs, names, strict=True)
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
