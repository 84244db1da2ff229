"""Plot the loss of a study over a hyperparameter: by default over the learning rate, one line per width.

    python study.py configs/studies/mup.yaml --jobs 2
    python scripts/plot_sweep.py runs/studies/mup --out docs/results/mup

Reads results.json of a study whose grid has a numeric axis (--over) and one other axis (--lines), besides the
scheme (one panel each) and the seed (averaged). Reports the best value of each line, for the mean and each
seed, and how many grid steps the best values of a scheme differ. Writes OUT.md, OUT.csv, OUT.png and OUT.svg.
"""

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from evaluation.comparable import comparable
from evaluation.reports.figures import COLOURS, INK, MARKERS, STYLE, save
from studies.errors import StudyError
from studies.results.losses import read_losses
from studies.results.stored import RESULTS, SEED, StoredStudy, read_results, read_study
from training.files import write_text
from training.logging.console import Parser, run_main


@dataclass(frozen=True)
class Sweep:
    """One line: NLL by value (ascending) and seed."""

    variant: str
    label: str
    nll: dict[float, dict[str, float]]

    @property
    def means(self) -> dict[float, float]:
        return {value: sum(seeds.values()) / len(seeds) for value, seeds in self.nll.items()}

    @property
    def best(self) -> float:
        """The value with the lowest mean."""
        return min(self.means, key=self.means.__getitem__)

    @property
    def winners(self) -> list[float]:
        """The best value of each seed."""
        seeds = next(iter(self.nll.values()))
        return [min(self.nll, key=lambda value: self.nll[value][seed]) for seed in seeds]


def read_sweeps(study: StoredStudy, evaluation: str, over: str, lines: str) -> list[Sweep]:
    """All lines of the grid: NLL at the trained length, as trained.

    Raises StudyError if the grid has other axes or cells have no results yet, and EvaluationError if they
    were evaluated on different targets.
    """
    axes = [axis for axis, _ in study.groups[0]]
    if sorted(axes) != sorted({over, lines}):
        raise StudyError(
            f"besides the scheme and {SEED} the axes are {', '.join(axes) or 'none'}; choose "
            "exactly two with "
            "--over and --lines"
        )
    found: dict[tuple[str, str], dict[float, dict[str, float]]] = {}
    measured: list[tuple[str, dict]] = []
    for group in study.groups:
        at = dict(group)
        try:
            value = float(at[over])
        except ValueError:
            raise StudyError(f"axis {over}: {at[over]!r} is not a number") from None
        where = ", ".join(f"{axis}={place}" for axis, place in group)
        losses = read_losses(study, evaluation, group)
        if losses is not None:
            measured.append((where, losses.facts))
        for variant in study.variants:
            units = losses.reference.get(variant.name, {}) if losses else {}
            wanted = [cell.seed for cell in study.of(variant, group)]
            if sorted(units) != sorted(wanted):
                why = next(iter(losses.excluded.values()), "") if losses else ""
                why = why or "some seeds have no results; run the study again"
                raise StudyError(f"{variant.name}, {where}: {why}")
            line = found.setdefault((variant.name, at[lines]), {})
            line[value] = {seed: float(nll.mean()) for seed, nll in units.items()}
    comparable(dict(measured))
    return [
        Sweep(variant, label, dict(sorted(nll.items())))
        for (variant, label), nll in sorted(found.items(), key=lambda item: _order(study, item[0][0]))
    ]


def _order(study: StoredStudy, variant: str) -> int:
    return [one.name for one in study.variants].index(variant)


def spread(sweeps: Sequence[Sweep]) -> int:
    """Grid steps between the lowest and the highest best value."""
    values = list(sweeps[0].nll)
    places = [values.index(sweep.best) for sweep in sweeps]
    return max(places) - min(places)


def page(sweeps: Sequence[Sweep], command: str, figure: str, over: str, lines: str) -> str:
    """The sweeps as Markdown, with the lowest NLL of each line in bold."""
    values = list(sweeps[0].nll)
    seeds = len(next(iter(sweeps[0].nll.values())))
    parts = [
        f"# Best {over} by {lines}",
        f"`{command}`",
        f"NLL in nats per token at the trained length, mean over documents and {seeds} training "
        f"seed{'s' if seeds > 1 else ''}; bold: the lowest of its line. Last column: the best {over} of "
        "each seed.",
    ]
    for variant in dict.fromkeys(sweep.variant for sweep in sweeps):
        mine = [sweep for sweep in sweeps if sweep.variant == variant]
        steps = spread(mine)
        rows = [f"| {lines} | {' | '.join(f'{value:g}' for value in values)} | by seed |"]
        rows.append("|---|" + "---:|" * len(values) + "---|")
        for sweep in mine:
            cells = [
                f"**{nll:.3f}**" if value == sweep.best else f"{nll:.3f}"
                for value, nll in sweep.means.items()
            ]
            winners = ", ".join(f"{value:g}" for value in sweep.winners)
            rows.append(f"| {sweep.label} | {' | '.join(cells)} | {winners} |")
        apart = "the same" if steps == 0 else f"{steps} step{'s' if steps > 1 else ''} of the grid apart"
        ends = "" if steps == 0 else f", from {min(s.best for s in mine):g} to {max(s.best for s in mine):g}"
        edge = [sweep.label for sweep in mine if sweep.best in (values[0], values[-1])]
        beyond = ""
        if edge:
            beyond = (
                f" At {lines} {', '.join(edge)} it is the last value of the grid and may not be the optimum."
            )
        parts += [f"## {variant}", f"Best {over}: {apart}{ends}.{beyond}", "\n".join(rows)]
    parts.append(f"![NLL over {over}, one line per {lines}]({figure})")
    return "\n\n".join(parts) + "\n"


def csv_text(sweeps: Sequence[Sweep], over: str, lines: str) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", lines, over, "seed", "nll"])
    for sweep in sweeps:
        for value, seeds in sweep.nll.items():
            writer.writerows((sweep.variant, sweep.label, value, seed, nll) for seed, nll in seeds.items())
    return text.getvalue()


def draw(sweeps: Sequence[Sweep], over: str, lines: str) -> Figure:
    """One panel per scheme; seeds are small points, the best value of each line has a ring."""
    variants = list(dict.fromkeys(sweep.variant for sweep in sweeps))
    with rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(variants), 3.1), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
        for panel, variant in zip(panels, variants, strict=True):
            mine = [sweep for sweep in sweeps if sweep.variant == variant]
            for n, sweep in enumerate(mine):
                color, marker = COLOURS[n % len(COLOURS)], MARKERS[n % len(MARKERS)]
                means = sweep.means
                panel.plot(
                    list(means), list(means.values()), color=color, marker=marker, ms=4, label=sweep.label
                )
                for value, seeds in sweep.nll.items():
                    panel.plot([value] * len(seeds), list(seeds.values()), ".", color=color, ms=2, alpha=0.6)
                panel.plot(sweep.best, means[sweep.best], "o", mfc="none", mec=INK, ms=10)
            panel.set_xscale("log")
            panel.set_xticks(list(mine[0].nll), [f"{value:g}" for value in mine[0].nll])
            panel.minorticks_off()
            panel.set(xlabel=over, title=variant)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("NLL, nats per token")
        panels[-1].legend(title=lines, frameon=False)
    return figure


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="directory of a study")
    parser.add_argument("--over", default="rate", metavar="AXIS", help="numeric axis along x (default: rate)")
    parser.add_argument(
        "--lines", default="width", metavar="AXIS", help="axis with one line per label (default: width)"
    )
    parser.add_argument("--evaluation", metavar="NAME", help="default: the first of the study")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="output path without suffix (default: STUDY/sweep)"
    )
    options = parser.parse_args()
    study = read_study(read_results(options.study))
    names = study.evaluations
    name = options.evaluation or next(iter(names), "")
    if name not in names:
        known = ", ".join(names) or "none; run the study first"
        raise StudyError(f"{options.study / RESULTS} has no evaluation {name!r}; known: {known}")
    sweeps = read_sweeps(study, name, options.over, options.lines)
    out = options.out or options.study / "sweep"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "scripts/plot_sweep.py", *sys.argv[1:]])
    text = page(sweeps, command, f"{out.name}.png", options.over, options.lines)
    print(text)
    write_text(out.with_suffix(".md"), text)
    write_text(out.with_suffix(".csv"), csv_text(sweeps, options.over, options.lines))
    save(draw(sweeps, options.over, options.lines), out.parent, out.name)
    return 0


if __name__ == "__main__":
    run_main(main)
