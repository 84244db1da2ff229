"""Plot what positional schemes compute, without training; takes a few seconds.

  python scripts/plot_positions.py                                  all figures, to docs/figures/positions
  python scripts/plot_positions.py decay --theta 10000 1000000      two bases
  python scripts/plot_positions.py wavelengths --theta 500000 --dim 128 --train-length 8192
  python scripts/plot_positions.py methods --factor 16
  python scripts/plot_positions.py decay --scheme '{name: rope, scaling: {name: yarn, factor: 4}}'
  python scripts/plot_positions.py biases --run runs/NAME           as trained and as initialized

figures:
  encodings      a token of ones at positions 0, 1, 2, ...: one panel per scheme
  inner_product  p_n · p_(n+d) of sinusoidal embeddings: depends on distance, not on direction
  decay          mean_j |Σ_(k<j) exp(i·d·θ_k)|, the bound on scores at distance d, by scheme, base and method
  angles         rotation angle between two tokens: RoPE and He and Xu's slower rotation
  wavelengths    wavelength of each pair of features; marked: longer than the training length
  biases         bias added to a logit at distance d, in one head
  methods        frequencies under each scaling method, relative to the trained ones

Each figure is written as PNG, SVG with text as text, and CSV with the plotted numbers. The same command
writes the same bytes. Schemes and methods come from the registry, so new ones are included automatically.
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # allows running from any directory

from data.files import write_text
from evaluation.reports.figures import save
from evaluation.schemes.curves import SchemeShape
from evaluation.schemes.figures import FIGURES, FigureRequest, FigureSpec
from training.config.yaml_io import parse_yaml
from training.errors import ConfigError
from training.logging.console import Console, Parser, run_main
from training.run.directory import load


def choice_of(text: str) -> dict[str, Any]:
    """The settings of a scheme from its name or from YAML."""
    try:
        read, _ = parse_yaml(text, text, numbered=False)
    except ConfigError:
        read = None
    choice = {"name": read} if isinstance(read, str) else read
    if not isinstance(choice, dict) or "name" not in choice:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a scheme: use a name such as rope, or settings such as "
            f"'{{name: rope, theta: 500000}}'"
        )
    return choice


def number(kind: type, low: float) -> Callable[[str], Any]:
    """An argparse type for numbers of at least `low`."""

    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} of at least {low:g}")
        return value

    return read


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help="default: all")
    add(
        "--scheme",
        action="append",
        default=[],
        type=choice_of,
        metavar="YAML",
        help="a scheme, by name or settings, instead of the default ones in encodings, decay, wavelengths "
        "and biases; repeatable",
    )
    add(
        "--theta",
        nargs="+",
        type=number(float, 1.0001),
        default=[10_000.0, 500_000.0],
        metavar="B",
        help="bases b of the frequencies b^(−2k/D); figures of one base use the first (10000 500000)",
    )
    add("--dim", type=number(int, 4), default=128, metavar="D", help="head dimension (128)")
    add("--heads", type=number(int, 1), default=8, metavar="H", help="heads of the biases (8)")
    add("--head", type=number(int, 0), default=3, metavar="h", help="index of the plotted head (3)")
    add(
        "--train-length",
        type=number(int, 2),
        default=2048,
        metavar="L0",
        help="training length in tokens (2048)",
    )
    add(
        "--factor",
        type=number(float, 1),
        default=8.0,
        metavar="s",
        help="scaling methods are plotted for s times the training length (8)",
    )
    add(
        "--distance",
        type=number(int, 8),
        default=256,
        metavar="N",
        help="maximum distance in decay and inner_product (256)",
    )
    add("--tokens", type=number(int, 2), default=8, metavar="N", help="number of tokens in encodings (8)")
    add("--run", action="append", default=[], metavar="RUN", help="biases: also plot a trained run")
    add("--dpi", type=number(int, 50), default=130, metavar="N", help="resolution of the PNG (130)")
    add("--bare", action="store_true", help="omit title, subtitle and note")
    add("--out", type=Path, metavar="FOLDER", help="default: docs/figures/positions")
    args = parser.parse_args()
    for name in args.figures:
        if name not in FIGURES:
            parser.error(f"unknown figure {name!r}; known: {', '.join(FIGURES)}")
    if args.head >= args.heads:
        parser.error(f"--head must be less than --heads {args.heads}, got {args.head}")
    return args


def main() -> None:
    args, console = parse(), Console()
    out = args.out or Path(__file__).resolve().parents[1] / "docs" / "figures" / "positions"
    trained = {}
    for run in args.run:
        for layers, scheme in load(run).model.position.items():
            trained[f"{Path(run).name} {layers}"] = scheme.double()
    request = FigureRequest(
        shape=SchemeShape(args.dim, args.heads, args.train_length),
        thetas=args.theta,
        factor=args.factor,
        distance=args.distance,
        tokens=args.tokens,
        head=args.head,
        schemes=args.scheme,
        trained=trained,
        bare=args.bare,
    )
    for name in args.figures or FIGURES:
        drawing = FIGURES[name](request)
        write_text(out / f"{name}.csv", table(drawing))
        console.info(str(save(drawing.figure, out, name, args.dpi)))


def table(drawing: FigureSpec) -> str:
    """The plotted numbers as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(drawing.columns)
    for row in drawing.rows:
        writer.writerow(f"{value:.10g}" if isinstance(value, float) else value for value in row)
    return text.getvalue()


if __name__ == "__main__":
    run_main(main)
