"""Compare runs: training loss, held-out NLL by length and learning rate over tokens, as a figure and a table.

    python scripts/plot_run.py runs/quickstart
    python scripts/plot_run.py runs/tiny-* --out figures/tiny.png

Reads metrics.jsonl, of runs in training too; of a step that was repeated the last line counts. Writes PNG,
SVG and CSV under the same name.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluation.figures import save
from studies.training_curves import csv_text, differences, names_of, read_curves
from studies.training_figure import training_figure
from training.console import Console, run_main
from training.files import write_text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.png", help="default: training.png in the first run's folder"
    )
    parser.add_argument(
        "--smooth", type=float, default=0.02, metavar="SHARE", help="of a run's steps, averaged (0.02)"
    )
    given = parser.parse_args()
    if not 0 <= given.smooth <= 1:
        parser.error(f"--smooth {given.smooth:g}: give a share between 0 and 1")
    out = given.out or given.runs[0] / "training.png"
    if out.suffix not in (".png", ".svg", ""):
        parser.error(
            f"--out {out}: PNG, SVG and CSV are written; give a name that ends in .png or in nothing"
        )
    names = names_of(given.runs)
    runs = [read_curves(folder, name) for folder, name in zip(given.runs, names, strict=True)]
    console = Console()
    for words in differences(runs):
        console.warn(words)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out.with_suffix(".csv"), csv_text(runs, given.smooth))
    drawn = save(training_figure(runs, given.smooth), out.parent, out.stem)
    for file in (drawn, drawn.with_suffix(".svg"), drawn.with_suffix(".csv")):
        console.say(str(file))
    return 0


if __name__ == "__main__":
    run_main(main)
