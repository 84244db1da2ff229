"""Draw what positional schemes do: no training, a few seconds, numbers beside each figure.

  python scripts/plot_positions.py                                  every figure, into docs/figures/positions
  python scripts/plot_positions.py decay --theta 10000 1000000      two bases
  python scripts/plot_positions.py wavelengths --theta 500000 --dim 128 --train-length 8192
  python scripts/plot_positions.py rules --factor 16
  python scripts/plot_positions.py decay --scheme '{name: rope, scaling: {name: yarn, factor: 4}}'
  python scripts/plot_positions.py biases --run runs/NAME           as trained, beside those that start

figures:
  encodings      what a token of ones becomes at positions 0, 1, 2, ...: one panel a scheme
  inner_product  p_n · p_(n+d) of sinusoidal embeddings: knows distance, not direction
  decay          mean_j |Σ_(k<j) exp(i·d·θ_k)|, the bound on scores at distance d, by scheme, base and rule
  angles         the angle between two tokens, RoPE against He and Xu's slower turn
  wavelengths    tokens of one turn of each pair, those marked that never made one in training
  biases         what schemes add to a logit at distance d, in one head
  rules          frequencies under each scaling rule, as a share of those trained

Each figure is written as PNG, as SVG with its words as text, and as CSV with the numbers drawn. The same
command writes the same bytes. Schemes and rules are found in the registry: a new one appears by itself.
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script, from any folder

from data.files import write_text
from evaluation.curves import Shape
from evaluation.drawings import FIGURES, Asked, Drawing
from evaluation.figures import save
from training.console import Console, run_main
from training.run import load


def choice_of(text: str) -> dict[str, Any]:
    """The settings of a scheme from its name alone or from YAML."""
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        read = None
    choice = {"name": read} if isinstance(read, str) else read
    if not isinstance(choice, dict) or "name" not in choice:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no scheme: give a name, as rope, or settings, as '{{name: rope, theta: 500000}}'"
        )
    return choice


def number(kind: type, low: float) -> Callable[[str], Any]:
    """A reader of numbers that are at least `low`, for argparse."""

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("figures", nargs="*", metavar="FIGURE", help="which; default: all")
    add(
        "--scheme",
        action="append",
        default=[],
        type=choice_of,
        metavar="YAML",
        help="a scheme, by name or settings, in place of the usual ones in encodings, decay, wavelengths and "
        "biases; may be given several times",
    )
    add(
        "--theta",
        nargs="+",
        type=number(float, 1.0001),
        default=[10_000.0, 500_000.0],
        metavar="B",
        help="bases b of the frequencies b^(−2k/D); where one is drawn, the first (10000 500000)",
    )
    add("--dim", type=number(int, 4), default=128, metavar="D", help="features of a head (128)")
    add("--heads", type=number(int, 1), default=8, metavar="H", help="heads of the biases (8)")
    add("--head", type=number(int, 0), default=3, metavar="h", help="the head that is drawn, from 0 (3)")
    add("--train-length", type=number(int, 2), default=2048, metavar="L0", help="in tokens (2048)")
    add(
        "--factor",
        type=number(float, 1),
        default=8.0,
        metavar="s",
        help="rules are drawn for s times the trained length (8)",
    )
    add(
        "--distance",
        type=number(int, 8),
        default=256,
        metavar="N",
        help="longest in decay and inner_product (256)",
    )
    add("--tokens", type=number(int, 2), default=8, metavar="N", help="tokens of encodings (8)")
    add("--run", action="append", default=[], metavar="RUN", help="biases: a trained run beside the others")
    add("--dpi", type=number(int, 50), default=130, metavar="N", help="of the PNG, 6.4 inches wide (130)")
    add("--bare", action="store_true", help="no title, subtitle and note: for a figure with a caption")
    add("--out", type=Path, metavar="FOLDER", help="default: docs/figures/positions of this repository")
    args = parser.parse_args()
    for name in args.figures:
        if name not in FIGURES:
            parser.error(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
    if args.head >= args.heads:
        parser.error(f"--head {args.head} does not exist among --heads {args.heads}, counted from 0")
    return args


def main() -> None:
    args, console = parse(), Console()
    out = args.out or Path(__file__).resolve().parents[1] / "docs" / "figures" / "positions"
    trained = {}
    for run in args.run:
        for layers, scheme in load(run).model.position.items():
            trained[f"{Path(run).name} {layers}"] = scheme.double()
    ask = Asked(
        shape=Shape(args.dim, args.heads, args.train_length),
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
        drawing = FIGURES[name](ask)
        write_text(out / f"{name}.csv", table(drawing))
        console.say(str(save(drawing.figure, out, name, args.dpi)))


def table(drawing: Drawing) -> str:
    """The numbers as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(drawing.columns)
    for row in drawing.rows:
        writer.writerow(f"{value:.10g}" if isinstance(value, float) else value for value in row)
    return text.getvalue()


if __name__ == "__main__":
    run_main(main)
