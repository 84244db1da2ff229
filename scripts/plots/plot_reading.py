"""Plot the read gain of each scheme of a study at a distance, beside the change of its loss.

    python study.py configs/studies/reading.yaml --jobs 2
    python scripts/plots/plot_reading.py runs/studies/reading --out docs/results/reading/figure

Reads results.csv of a study with one evaluation of loss, by `targets_by=repetition`, at the trained
length and a longer one. Prints a Markdown table and writes it to OUT.md, and OUT.png and OUT.svg.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # needs no installation

from data.files import write_text
from errors import StudyError
from evaluation.reports.document import markdown_table, with_ends
from evaluation.reports.figures import COLOURS, FigureText, draw_dot, panels, rows_panel, save
from settings.script import Parser, run_main


def read_columns(file: Path) -> dict[str, pd.DataFrame]:
    """Value, low and high of every variant, by column of the figure; the variant with the largest
    read gain at the largest distance comes first."""
    rows = pd.read_csv(file)
    rows = rows[rows.seed.isna()].set_index("variant")
    gains = rows.query("metric == 'read_gain'")
    if gains.empty:
        raise StudyError(f"{file} has no read gains; the study needs targets_by=repetition")
    trained = int(rows.query("metric == 'nll_as_trained'").length.iloc[0])
    longest = int(gains.length.max())
    changes = rows.query("metric == 'delta' and length == @longest")
    near = gains.query("length == until == @trained")
    far = gains.query("length == until == @longest").sort_values("value", ascending=False)
    columns = {
        f"change of the loss, {trained:,} to {longest:,} tokens": changes,
        f"read gain within the trained length, {trained // 2:,}–{trained - 1:,}": near,
        f"read gain beyond, {longest // 2:,}–{longest - 1:,}": far,
    }
    return {title: own.loc[far.index, ["value", "low", "high"]] for title, own in columns.items()}


def draw(columns: dict[str, pd.DataFrame]) -> Figure:
    """One panel per column, one line per variant."""
    shown = []
    for n, (title, own) in enumerate(columns.items()):
        heading, _, x = title.rpartition(", ")

        def draw_column(axes: Axes, own: pd.DataFrame = own, color: str = COLOURS[n]) -> None:
            axes.locator_params(axis="x", nbins=5)
            for at, ends in enumerate(own.to_numpy().tolist()):
                draw_dot(axes, at, ends, color, ms=4)

        names = [str(name) if n == 0 else "" for name in own.index]
        shown.append(rows_panel(names, draw_column, heading=heading, x=x, row=0.19))
    return panels(shown, FigureText(), columns=len(shown), width=9.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="directory of a study")
    parser.add_argument("--out", type=Path, metavar="PATH", help="output path without suffix")
    options = parser.parse_args(arguments)
    columns = read_columns(options.study / "results.csv")
    names = next(iter(columns.values())).index
    rows = [[name, *(with_ends(*own.loc[name]) for own in columns.values())] for name in names]
    table = markdown_table(["scheme", *columns], rows)
    print(table)
    out = options.out or options.study / "reading"
    write_text(out.with_suffix(".md"), f"{table}\n")
    save(draw(columns), out.parent, out.name)
    return 0


if __name__ == "__main__":
    run_main(main)
