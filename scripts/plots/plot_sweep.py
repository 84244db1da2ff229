"""Plot the loss of a study over the learning rate, one line per width.

    python study.py configs/studies/mup.yaml --jobs 2
    python scripts/plots/plot_sweep.py runs/studies/mup --out docs/results/mup

Reads results.csv of a study whose grid has the axes `rate` and `width`, besides the scheme (one
panel each) and the seed (averaged). Reports the best rate of each width, for the mean and each
seed. Writes OUT.md, OUT.csv, OUT.png and OUT.svg.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from data.files import write_text
from errors import StudyError
from evaluation.reports.document import markdown_table
from evaluation.reports.figures import (
    COLOURS,
    INK,
    MARKERS,
    Curve,
    FigureText,
    Panel,
    panels,
    save,
)
from evaluation.reports.results_files import write_table
from settings.script import Parser, run_main

# by variant and width: NLL by rate (rows, ascending) and seed
Sweeps = dict[str, dict[str, pd.DataFrame]]


def read_rows(folder: Path) -> pd.DataFrame:
    """NLL of every variant, width, rate and seed at the trained length, as trained.

    Raises StudyError if the grid has other axes, cells have no results yet, or cells were evaluated
    on different targets.
    """
    file = folder / "results.csv"
    if not file.is_file():
        raise StudyError(f"{file} does not exist; run the study first")
    rows = pd.read_csv(file, dtype={"width": str, "seed": str})
    axes = rows.columns[2 : list(rows.columns).index("variant")]
    if sorted(axes) != ["rate", "width"]:
        raise StudyError(f"{file}: besides the scheme and the seed the axes must be rate and width")
    rows = rows[(rows.metric == "nll_as_trained") & rows.seed.notna()]
    if rows.targets_hash.nunique() > 1:
        raise StudyError(f"{file}: the targets_hash of the cells differs; evaluate them again")
    cells = rows.groupby(["variant", "width", "rate"]).seed.nunique()
    complete = rows.variant.nunique() * rows.width.nunique() * rows.rate.nunique()
    if len(cells) < complete or cells.nunique() != 1:
        raise StudyError(f"{file}: cells have no results; run the study again")
    rows = rows.rename(columns={"value": "nll"})
    return rows[["variant", "width", "rate", "seed", "nll"]].sort_values("rate", kind="stable")


def sweeps_of(rows: pd.DataFrame) -> Sweeps:
    sweeps: Sweeps = {}
    for (variant, width), own in rows.groupby(["variant", "width"], sort=False):
        table = own.pivot(index="rate", columns="seed", values="nll")
        sweeps.setdefault(str(variant), {})[str(width)] = table
    return sweeps


def page(sweeps: Sweeps, command: str, figure: str) -> str:
    """The sweeps as Markdown, with the lowest NLL of each width in bold."""
    parts = [
        "# Best learning rate by width",
        f"`{command}`",
        "NLL in nats per token at the trained length, mean over documents and training seeds; bold: "
        "the lowest of its line. Last column: the best rate of each seed.",
    ]
    for variant, own in sweeps.items():
        rows = []
        for width, nll in own.items():
            means = nll.mean(axis=1)
            cells = [f"**{x:.3f}**" if x == means.min() else f"{x:.3f}" for x in means]
            rows.append([width, *cells, ", ".join(f"{best:g}" for best in nll.idxmin())])
        values = [f"{value:g}" for value in means.index]
        parts += [f"## {variant}", markdown_table(["width", *values, "by seed"], rows)]
    parts.append(f"![NLL over rate, one line per width]({figure})")
    return "\n\n".join(parts) + "\n"


def draw(sweeps: Sweeps) -> Figure:
    """One panel per scheme; seeds are small points, the best value of each line has a ring."""
    tables = [table for own in sweeps.values() for table in own.values()]
    low = min(table.min(axis=None) for table in tables)
    high = max(table.max(axis=None) for table in tables)
    room = 0.06 * (high - low) or 0.05
    values = sorted({value for table in tables for value in table.index})

    def scales(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(low - room, high + room)

    shown = []
    for variant, own in sweeps.items():
        curves = []
        for n, (width, table) in enumerate(own.items()):
            color = COLOURS[n % len(COLOURS)]
            marker = MARKERS[n % len(MARKERS)]
            x = list(table.index)
            means = table.mean(axis=1)
            curves.append(Curve(f"width {width}", x, list(means), color, marker=marker, size=4))
            for seed in table.columns:
                points = Curve(
                    "", x, list(table[seed]), color, dash="", marker=".", size=3, alpha=0.6
                )
                curves.append(points)
            best = [means.idxmin()], [means.min()]
            curves.append(Curve("", *best, INK, dash="", marker="o", size=10, hollow=True))
        shown.append(Panel(curves, variant, scales=scales))
    return panels(
        shown,
        FigureText(),
        x="learning rate",
        y="NLL, nats per token",
        columns=len(shown),
        names="below",
        width=3.2 * len(shown),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="directory of a study")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="output path without suffix (default: STUDY/sweep)"
    )
    options = parser.parse_args(arguments)
    rows = read_rows(options.study)
    sweeps = sweeps_of(rows)
    out = options.out or options.study / "sweep"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "scripts/plots/plot_sweep.py", *(arguments or sys.argv[1:])])
    text = page(sweeps, command, f"{out.name}.png")
    print(text)
    write_text(out.with_suffix(".md"), text)
    write_table(out.with_suffix(".csv"), rows)
    save(draw(sweeps), out.parent, out.name)
    return 0


if __name__ == "__main__":
    run_main(main)
