"""Coordinate check: change of activations in the first steps of training, by width.

  python scripts/checks/coordinate_check.py --out docs/results/coordinate_check
  python scripts/checks/coordinate_check.py --widths 64 128 256 512 --grow features --optimizer muon

The coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1). Models that differ only
in width take a few steps on the same random tokens at the same learning rate. The table has the RMS
change of each activation, mean over seeds, and its slope, the exponent of its growth with the
width: near 0 with muP, positive without. Writes OUT.md, OUT.csv and OUT.png.

Wider models have more heads (--grow heads) or larger heads (--grow features, where muP scales
attention by 1/D).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.files import write_text
from errors import TrainingError
from evaluation.reports.results_table import markdown_table
from model import ModelSettings, TokenPositions, Transformer
from run_directory.optimizer_settings import (
    AdamWBase,
    AdamWSettings,
    MuonSettings,
    OptimizerSettings,
)
from settings.script import Parser, run_main
from training.optim.optimizer import make_optimizer, set_learning_rates

VOCABULARY = 64
ROWS = 8
LENGTH = 32
HEAD = 16
# outputs of the last block's parts, of all blocks, the head
PARTS = ("attention", "mlp", "stream", "logits")
OPTIMIZERS = {
    "adamw": lambda lr: AdamWSettings(lr=lr, weight_decay=0.0),
    "muon": lambda lr: MuonSettings(
        lr=lr, weight_decay=0.0, adamw=AdamWBase(lr=lr, weight_decay=0.0)
    ),
}


def slope(changes: pd.Series) -> float:
    """The exponent of the growth of changes with the width, their index."""
    exponent = np.polyfit(np.log(changes.index), np.log(changes.to_numpy()), 1)[0]
    return round(float(exponent), 6) + 0.0  # no negative zero


def model_of(width: int, base: int | None, grow: str, seed: int) -> Transformer:
    """A model of this width, with muP if `base`, the base width, is given."""
    first = base or width
    heads = width // HEAD if grow == "heads" else 2
    mup = None
    if base is not None:
        mup = {"base_dim": first, "base_head_dim": HEAD if grow == "heads" else first // 2}
    settings = ModelSettings.model_validate(
        {"dim": width, "layers": 2, "heads": heads, "ffn_dim": 2 * width, "mup": mup}
    )
    return Transformer(settings, VOCABULARY, LENGTH).initialize(seed)


@torch.no_grad()
def activations(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """The measured activations, by name."""
    seen: dict[str, Tensor] = {}
    block = model.layers[-1]
    watched = {"attention": block.attention, "mlp": block.mlp, "stream": block}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
        for name, module in watched.items()
    ]
    seen["logits"] = model(tokens, TokenPositions.plain(tokens.shape[1]))
    for hook in hooks:
        hook.remove()
    return seen


def changes(
    model: Transformer, optimizer: OptimizerSettings, steps: int, seed: int
) -> dict[str, float]:
    """RMS change of each activation after some steps on the same random tokens."""
    drawn = torch.randint(
        VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    tokens = drawn[:, :-1]
    targets = drawn[:, 1:]
    before = activations(model, tokens)
    update = make_optimizer(model, optimizer)
    set_learning_rates(update, optimizer.rates)
    for _ in range(steps):
        model(tokens, TokenPositions.plain(LENGTH), targets).mean().backward()
        update.step()
        update.zero_grad()
    after = activations(model, tokens)
    return {part: (after[part] - before[part]).square().mean().sqrt().item() for part in PARTS}


def check(
    widths: Sequence[int], optimizer: OptimizerSettings, *, grow: str, steps: int, seeds: int
) -> pd.DataFrame:
    """Mean changes over seeds: a row for each activation without and with muP, whose base is the
    smallest width, and a column for each width."""
    mean_changes = {}
    for kind, base in (("standard", None), ("muP", min(widths))):
        for width in widths:
            each = [
                changes(model_of(width, base, grow, seed), optimizer, steps, seed)
                for seed in range(seeds)
            ]
            for part in PARTS:
                mean_changes.setdefault((kind, part), {})[width] = (
                    sum(own[part] for own in each) / seeds
                )
    return pd.DataFrame(mean_changes).T


def page(table: pd.DataFrame, command: str, figure: str) -> str:
    """The table as a page of Markdown, with the figure of that name."""
    rows = [
        [*key, *(f"{c:.4f}" for c in row), f"{slope(row):+.2f}"] for key, row in table.iterrows()
    ]
    parts = [
        "# Coordinate check",
        f"`{command}`",
        "RMS change of activations after training, by width; the slope is the exponent of its "
        "growth with the width. `attention` and `mlp` are the outputs of the last block, `stream` "
        "is the residual stream after it.",
        markdown_table(
            ["parametrization", "activation", *table.columns, "slope"],
            rows,
            texts=2,
        ),
        f"![RMS change over width]({figure})",
    ]
    return "\n\n".join(parts) + "\n"


def draw(table: pd.DataFrame) -> Figure:
    """Changes over width on logarithmic axes, one panel for each activation."""
    figure = Figure(figsize=(3 * len(PARTS), 3), layout="constrained")
    panels = figure.subplots(1, len(PARTS))
    for panel, part in zip(panels, PARTS, strict=True):
        for (kind, _), row in table[table.index.get_level_values(1) == part].iterrows():
            panel.plot(
                row.index,
                row,
                marker="o",
                label=f"{kind} ({slope(row):+.2f})",
            )
        panel.set(xscale="log", yscale="log", xlabel="width", title=part)
        panel.set_xticks(table.columns, [str(width) for width in table.columns])
        panel.minorticks_off()
        panel.legend()
    panels[0].set_ylabel("RMS change")
    return figure


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[32, 64, 128, 256],
    )
    parser.add_argument(
        "--grow",
        choices=("heads", "features"),
        default="heads",
        help="what increases with the width",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=Path("coordinate_check"), help="path without a suffix"
    )
    given = parser.parse_args()
    if len(set(given.widths)) < 2 or any(
        width % HEAD or width < 2 * HEAD for width in given.widths
    ):
        raise TrainingError(
            f"--widths: set at least two different multiples of {HEAD} from {2 * HEAD} on"
        )
    if min(given.steps, given.seeds) < 1 or not given.lr > 0:
        raise TrainingError("--steps and --seeds must be at least 1, --lr above 0")
    optimizer = OPTIMIZERS[given.optimizer](given.lr)
    table = check(
        sorted(set(given.widths)), optimizer, grow=given.grow, steps=given.steps, seeds=given.seeds
    )
    command = " ".join(["python", "scripts/checks/coordinate_check.py", *sys.argv[1:]])
    text = page(table, command, given.out.with_suffix(".png").name)
    print(text)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out.with_suffix(".md"), text)
    tidy = table.rename_axis(["parametrization", "activation"]).rename_axis("width", axis=1).stack()
    write_text(given.out.with_suffix(".csv"), tidy.rename("rms_change").to_csv())
    draw(table).savefig(given.out.with_suffix(".png"), dpi=150)
    return 0


if __name__ == "__main__":
    run_main(main)
