"""Plot what each scheme of a study reads at a distance beside the change of its loss.

    python study.py configs/studies/reading.yaml --jobs 2
    python scripts/plots/plot_reading.py runs/studies/reading --out docs/results/reading

Reads results.csv of a study with an evaluation by `targets_by=repetition` at the trained length and
a longer one. Writes a Markdown table to OUT.md, and OUT.png and OUT.svg.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.files import write_text
from errors import StudyError
from evaluation.reports.document import markdown_table, with_ends
from evaluation.reports.figures import (
    COLOURS,
    Curve,
    FigureText,
    Panel,
    name_rows,
    panels,
    save,
)
from settings.script import Parser, run_main

CHANGE = "change of the loss"
NEAR = "read gain within the trained length"
FAR = "read gain beyond"


def read_columns(file: Path) -> dict[str, pd.DataFrame]:
    """By column of the figure: value, low and high of every variant, the one that reads most at the
    largest distance last."""
    rows = pd.read_csv(file)
    rows = rows[rows.seed.isna()].set_index("variant")
    gains = rows[rows.metric == "read_gain"]
    if gains.empty:
        raise StudyError(f"{file} has no read gains; the study needs targets_by=repetition")
    evaluation = gains.evaluation.iloc[0]
    trained = int(gains.trained_length.iloc[0])
    longest = int(gains.length.max())
    changes = rows[(rows.metric == "delta") & (rows.evaluation == evaluation)]
    near = gains[(gains.length == trained) & (gains["until"] == trained)]
    far = gains[(gains.length == longest) & (gains["until"] == longest)].sort_values("value")
    columns = {
        f"{CHANGE}, {trained:,} to {longest:,} tokens": changes[changes.length == longest],
        f"{NEAR}, {trained // 2:,}–{trained - 1:,}": near,
        f"{FAR}, {longest // 2:,}–{longest - 1:,}": far,
    }
    return {
        title: own.loc[far.index, ["value", "low", "high"]].astype(float)
        for title, own in columns.items()
    }


def draw(columns: dict[str, pd.DataFrame]) -> Figure:
    """One panel per column, one line per variant."""
    variants = list(next(iter(columns.values())).index)
    places = list(range(len(variants)))
    shown = []
    for n, (title, own) in enumerate(columns.items()):

        def scales(axes: Axes, names: Sequence[str] = variants if n == 0 else ()) -> None:
            axes.set_ylim(-0.6, len(places) - 0.4)
            name_rows(axes, names or [""] * len(places))
            axes.locator_params(axis="x", nbins=5)

        curves = [
            Curve("", [value], [place], COLOURS[n], [low], [high], True, marker="o", size=4)
            for place, (value, low, high) in enumerate(own.to_numpy().tolist())
        ]
        heading, _, where = title.rpartition(", ")
        height = 0.4 + 0.19 * len(places)
        shown.append(Panel(curves, heading, x=where, scales=scales, named=False, height=height))
    return panels(shown, FigureText(), columns=len(shown), width=9.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="directory of a study")
    parser.add_argument("--out", type=Path, metavar="PATH", help="output path without suffix")
    options = parser.parse_args(arguments)
    columns = read_columns(options.study / "results.csv")
    rows = [
        [name, *(with_ends(*own.loc[name].to_list()) for own in columns.values())]
        for name in reversed(next(iter(columns.values())).index)
    ]
    table = markdown_table(["scheme", *columns], rows)
    print(table)
    out = options.out or options.study / "reading"
    write_text(out.with_suffix(".md"), f"{table}\n")
    save(draw(columns), out.parent, out.name)
    return 0


if __name__ == "__main__":
    run_main(main)
