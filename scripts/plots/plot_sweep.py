"""Plot the loss of a study over a hyperparameter: by default over the learning rate, one line per width.

    python study.py configs/studies/mup.yaml --jobs 2
    python scripts/plots/plot_sweep.py runs/studies/mup --out docs/results/mup

Reads results.json of a study whose grid has a numeric axis (--over) and one other axis (--lines), besides the
scheme (one panel each) and the seed (averaged). Reports the best value of each line, for the mean and each
seed, and how many grid steps the best values of a scheme differ. Writes OUT.md, OUT.csv, OUT.png and OUT.svg.
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
from evaluation.comparable import comparable
from evaluation.reports.charts import (
    COLOURS,
    INK,
    MARKERS,
    Curve,
    FigureText,
    Panel,
    panels_figure,
    save,
)
from evaluation.reports.results_table import markdown_table, write_table
from evaluation.reports.text import counted
from settings.script import Parser, run_main
from studies.results.losses import read_losses
from studies.results.stored import RESULTS, SEED, StoredStudy, read_results, read_study

# by variant and line: NLL by value (rows, ascending) and seed
Sweeps = dict[str, dict[str, pd.DataFrame]]


def read_sweeps(study: StoredStudy, evaluation: str, over: str, lines: str) -> Sweeps:
    """The lines of each variant: NLL at the trained length, as trained.

    Raises StudyError if the grid has other axes or cells have no results yet, and EvaluationError if they
    were evaluated on different targets.
    """
    axes = [axis for axis, _ in study.groups[0]]
    if sorted(axes) != sorted({over, lines}):
        raise StudyError(
            f"besides the scheme and {SEED} the axes are {', '.join(axes) or 'none'}; choose exactly two "
            "with --over and --lines"
        )
    found: dict[str, dict[str, dict[float, dict[str, float]]]] = {
        one.name: {} for one in study.variants
    }
    facts = {}
    for group in study.groups:
        labels = dict(group)
        where = ", ".join(f"{axis}={label}" for axis, label in group)
        try:
            value = float(labels[over])
        except ValueError:
            raise StudyError(f"axis {over}: {labels[over]!r} is not a number") from None
        losses = read_losses(study, evaluation, group)
        facts |= {where: losses.facts} if losses else {}
        for variant in study.variants:
            units = losses.reference.get(variant.name, {}) if losses else {}
            if sorted(units) != sorted(cell.seed for cell in study.of(variant, group)):
                reasons = [*losses.excluded.values()] if losses else []
                reason = next(
                    filter(None, reasons), "some seeds have no results; run the study again"
                )
                raise StudyError(f"{variant.name}, {where}: {reason}")
            line = found[variant.name].setdefault(labels[lines], {})
            line[value] = {seed: float(nll.mean()) for seed, nll in units.items()}
    comparable(facts)
    return {
        variant: {label: pd.DataFrame(nll).T.sort_index() for label, nll in own.items()}
        for variant, own in found.items()
    }


def page(sweeps: Sweeps, command: str, figure: str, over: str, lines: str) -> str:
    """The sweeps as Markdown, with the lowest NLL of each line in bold."""
    first = next(iter(next(iter(sweeps.values())).values()))
    values = list(first.index)
    parts = [
        f"# Best {over} by {lines}",
        f"`{command}`",
        "NLL in nats per token at the trained length, mean over documents and "
        f"{counted(len(first.columns), 'training seed')}; bold: the lowest of its line. Last column: "
        f"the best {over} of each seed.",
    ]
    for variant, own in sweeps.items():
        rows = []
        best = {label: nll.mean(axis=1).idxmin() for label, nll in own.items()}
        for label, nll in own.items():
            cells = [
                f"**{v:.3f}**" if at == best[label] else f"{v:.3f}"
                for at, v in nll.mean(axis=1).items()
            ]
            rows.append([label, *cells, ", ".join(f"{value:g}" for value in nll.idxmin())])
        low = min(best.values())
        high = max(best.values())
        text = f"Best {over}: the same."
        if steps := values.index(high) - values.index(low):
            text = f"Best {over}: {counted(steps, 'step')} of the grid apart, from {low:g} to {high:g}."
        if edge := [label for label, at in best.items() if at in (values[0], values[-1])]:
            where = f"At {lines} {', '.join(edge)}"
            text += f" {where} it is the last value of the grid and may not be the optimum."
        table = markdown_table([lines, *(f"{value:g}" for value in values), "by seed"], rows)
        parts += [f"## {variant}", text, table]
    parts.append(f"![NLL over {over}, one line per {lines}]({figure})")
    return "\n\n".join(parts) + "\n"


def records(sweeps: Sweeps, over: str, lines: str) -> list[dict]:
    """The rows of the CSV file."""
    return [
        {"variant": variant, lines: label, over: value, "seed": seed, "nll": nll}
        for variant, own in sweeps.items()
        for label, table in own.items()
        for (value, seed), nll in table.stack().items()
    ]


def draw(sweeps: Sweeps, over: str, lines: str) -> Figure:
    """One panel per scheme; seeds are small points, the best value of each line has a ring."""
    panels = []
    for variant, own in sweeps.items():
        curves = []
        for (label, table), color, marker in zip(
            own.items(), COLOURS * len(own), MARKERS * len(own), strict=False
        ):
            means = table.mean(axis=1)
            curves.append(
                Curve(
                    f"{lines} {label}", list(means.index), list(means), color, marker=marker, size=4
                )
            )
            for value, seeds in table.iterrows():
                one = [value] * len(seeds), list(seeds)
                curves.append(Curve("", *one, color, dash="", marker=".", size=3, alpha=0.6))
            ring = {"dash": "", "marker": "o", "size": 10, "hollow": True, "order": 1.5}
            curves.append(Curve("", [means.idxmin()], [means.min()], INK, **ring))
        panels.append(Panel(curves, variant))
    nll = [row["nll"] for row in records(sweeps, over, lines)]
    room = 0.06 * (max(nll) - min(nll)) or 0.05

    def scales(axes: Axes, panel: Panel) -> None:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(list(panel.curves[0].x)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(min(nll) - room, max(nll) + room)

    how = {"columns": len(panels), "names": "below", "width": 3.2 * len(panels)}
    return panels_figure(panels, FigureText(), scales, x=over, y="NLL, nats per token", **how)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="directory of a study")
    parser.add_argument(
        "--over", default="rate", metavar="AXIS", help="numeric axis along x (default: rate)"
    )
    parser.add_argument(
        "--lines",
        default="width",
        metavar="AXIS",
        help="axis with one line per label (default: width)",
    )
    parser.add_argument("--evaluation", metavar="NAME", help="default: the first of the study")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="output path without suffix (default: STUDY/sweep)"
    )
    options = parser.parse_args(arguments)
    study = read_study(read_results(options.study))
    name = options.evaluation or next(iter(study.evaluations), "")
    if name not in study.evaluations:
        known = ", ".join(study.evaluations) or "none; run the study first"
        raise StudyError(f"{options.study / RESULTS} has no evaluation {name!r}; known: {known}")
    sweeps = read_sweeps(study, name, options.over, options.lines)
    out = options.out or options.study / "sweep"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "scripts/plots/plot_sweep.py", *(arguments or sys.argv[1:])])
    text = page(sweeps, command, f"{out.name}.png", options.over, options.lines)
    print(text)
    write_text(out.with_suffix(".md"), text)
    write_table(out.with_suffix(".csv"), records(sweeps, options.over, options.lines))
    save(draw(sweeps, options.over, options.lines), out.parent, out.name)
    return 0


if __name__ == "__main__":
    run_main(main)
