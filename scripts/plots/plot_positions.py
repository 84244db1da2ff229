"""Plot what positional schemes compute, without training; takes a few seconds.

  python scripts/plots/plot_positions.py   all figures, to docs/figures/positions
  python scripts/plots/plot_positions.py decay --theta 10000 1000000      two bases
  python scripts/plots/plot_positions.py wavelengths --theta 500000 --dim 128 --train-length 8192
  python scripts/plots/plot_positions.py methods --factor 16
  python scripts/plots/plot_positions.py decay --scheme '{name: rope, scaling: {name: yarn, factor:
  4}}'
  python scripts/plots/plot_positions.py biases --run runs/NAME           as trained and as initialized

figures:
  encodings      a token of ones at positions 0, 1, 2, ...: one panel per scheme
  inner_product  p_n · p_(n+d) of sinusoidal embeddings: depends on distance, not on direction
  decay          mean_j |Σ_(k<j) exp(i·d·θ_k)|, the bound on scores at distance d, by scheme, base and method
  angles         rotation angle between two tokens: RoPE and He and Xu's slower rotation
  wavelengths    wavelength of each pair of features; marked: longer than the trained length
  biases         bias added to a logit at distance d, in one head
  methods        frequencies under each scaling method, relative to the trained ones

Each figure is written as PNG, SVG with text as text, and CSV with the plotted numbers. The same
command writes the same bytes. Schemes and methods come from the registry, so new ones are included
automatically.
"""

import argparse
import math
from pathlib import Path
from typing import Any, cast

from errors import ConfigError
from evaluation.reports.figures import save
from evaluation.reports.report import write_table
from evaluation.schemes.curves import SchemeShape
from evaluation.schemes.scheme_figures import FIGURES, FigureRequest
from model.position import PositionalScheme
from run_directory.console import Console
from run_directory.run import Run
from settings.script import Parser, run_main
from settings.yaml_io import parse_yaml

OUT = Path(__file__).resolve().parents[2] / "docs" / "figures" / "positions"
NUMBERS = {  # option -> type, least value, default, metavar, help
    "dim": (int, 4, 128, "D", "head dimension"),
    "heads": (int, 1, 8, "H", "heads of the biases"),
    "head": (int, 0, 3, "h", "index of the plotted head"),
    "train-length": (int, 2, 2048, "L0", "trained length in tokens"),
    "factor": (float, 1, 8.0, "s", "scaling methods are plotted for s times the trained length"),
    "distance": (int, 8, 256, "N", "maximum distance in decay and inner_product"),
    "tokens": (int, 2, 8, "N", "number of tokens in encodings"),
    "dpi": (int, 50, 130, "N", "resolution of the PNG"),
}
HELP = {
    "scheme": "a scheme, by name or settings, instead of the default ones in encodings, decay, "
    "wavelengths and biases; repeatable",
    "theta": "bases b of the frequencies b^(−2k/D); figures of one base use the first (10000 "
    "500000)",
}


def choice_of(text: str) -> dict[str, Any]:
    """The settings of a scheme from its name or from YAML."""
    try:
        read, _ = parse_yaml(text, text, numbered=False)
    except ConfigError:
        read = None
    choice = {"name": read} if isinstance(read, str) else read
    if not isinstance(choice, dict) or "name" not in choice:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a scheme: use a name such as rope, or settings such as '{{name: "
            f"rope, theta: 500000}}'"
        )
    return choice


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help="default: all")
    add(
        "--scheme", action="append", default=[], type=choice_of, metavar="YAML", help=HELP["scheme"]
    )
    thetas = [10_000.0, 500_000.0]
    add("--theta", nargs="+", type=float, default=thetas, metavar="B", help=HELP["theta"])
    for name, (kind, _, default, metavar, text) in NUMBERS.items():
        text = f"{text} ({default:g})"
        add(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    add(
        "--run",
        action="append",
        default=[],
        metavar="RUN",
        help="biases: also plot a trained run",
    )
    add(
        "--out",
        type=Path,
        default=OUT,
        metavar="FOLDER",
        help="default: docs/figures/positions",
    )
    args = parser.parse_args()
    for name in args.figures:
        if name not in FIGURES:
            parser.error(f"unknown figure {name!r}; known: {', '.join(FIGURES)}")
    for name, (_, low, *_) in NUMBERS.items():
        value = getattr(args, name.replace("-", "_"))
        if not low <= value < math.inf:
            parser.error(f"--{name} must be at least {low:g}, got {value}")
    if not all(1 < theta < math.inf for theta in args.theta):
        parser.error(f"--theta must be above 1, got {args.theta}")
    if args.head >= args.heads:
        parser.error(f"--head must be less than --heads {args.heads}, got {args.head}")
    return args


def main() -> None:
    args = parse()
    console = Console()
    request = FigureRequest(
        shape=SchemeShape(args.dim, args.heads, args.train_length),
        thetas=args.theta,
        schemes=args.scheme,
        trained={
            f"{Path(run).name} {layers}": cast(PositionalScheme, scheme.double())
            for run in args.run
            for layers, scheme in Run.open(run).load().model.position.items()
        },
        **{key: getattr(args, key) for key in ("factor", "distance", "tokens", "head")},
    )
    for name in args.figures or FIGURES:
        drawn = FIGURES[name](request)
        rows = [[f"{x:.10g}" if isinstance(x, float) else x for x in row] for row in drawn.rows]
        write_table(
            args.out / f"{name}.csv", [dict(zip(drawn.columns, row, strict=True)) for row in rows]
        )
        console.info(str(save(drawn.figure, args.out, name, args.dpi)))


if __name__ == "__main__":
    run_main(main)
