"""Coordinate check: change of activations in the first steps of training, by width.

  python scripts/checks/coordinate_check.py --out docs/results/coordinate_check
  python scripts/checks/coordinate_check.py --widths 64 128 256 512 --grow features --optimizer muon

The coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1). Models that differ only in width
take a few steps on the same random tokens at the same learning rate. The table has the RMS change of each
activation, mean over seeds, and its slope, the exponent of its growth with the width: near 0 with muP,
positive without. Writes OUT.md, OUT.csv and OUT.png.

Wider models have more heads (--grow heads) or larger heads (--grow features, where muP scales attention by
1/D).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.files import write_text
from errors import TrainingError
from evaluation.reports.base import write_table
from model import ModelSettings, TokenPositions, Transformer
from training.config.optimizer_settings import AdamWBase, AdamWSettings, MuonSettings, OptimizerSettings
from training.optim.optimizer import make_optimizer, set_learning_rates
from training.script import Parser, run_main

VOCABULARY, ROWS, LENGTH, HEAD = 64, 8, 32, 16
PARTS = ("attention", "mlp", "stream", "logits")  # outputs of the last block's parts, of all blocks, the head
OPTIMIZERS = {
    "adamw": lambda lr: AdamWSettings(lr=lr, weight_decay=0.0),
    "muon": lambda lr: MuonSettings(lr=lr, weight_decay=0.0, adamw=AdamWBase(lr=lr, weight_decay=0.0)),
}


@dataclass(frozen=True)
class ActivationRow:
    """The change of one activation at every width; `slope` is of the logarithms of both."""

    kind: str
    part: str
    changes: dict[int, float]

    @property
    def slope(self) -> float:
        logs = np.log(list(self.changes.items()))
        return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


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


def changes(model: Transformer, optimizer: OptimizerSettings, steps: int, seed: int) -> dict[str, float]:
    """RMS change of each activation after some steps on the same random tokens."""
    drawn = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    tokens, targets = drawn[:, :-1], drawn[:, 1:]
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
) -> list[ActivationRow]:
    """The rows of the table: each activation without and with muP, whose base is the smallest width."""
    rows = []
    for kind, base in (("standard", None), ("muP", min(widths))):
        found = {
            width: [
                changes(model_of(width, base, grow, seed), optimizer, steps, seed) for seed in range(seeds)
            ]
            for width in widths
        }
        for part in PARTS:
            means = {width: sum(one[part] for one in all_) / seeds for width, all_ in found.items()}
            rows.append(ActivationRow(kind, part, means))
    return rows


def table(rows: Sequence[ActivationRow], command: str, figure: str) -> str:
    """The rows as a page of Markdown, with the figure of that name."""
    widths = list(rows[0].changes)
    head = ["parametrization", "activation", *map(str, widths), "slope"]
    lines = [
        "# Coordinate check",
        "",
        f"`{command}`",
        "",
        "RMS change of activations after training, by width; the slope is the exponent of its growth with "
        "the width. `attention` and `mlp` are the outputs of the last block, `stream` is the residual stream "
        "after it.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in rows:
        cells = [row.kind, row.part, *(f"{change:.4f}" for change in row.changes.values())]
        lines.append(f"| {' | '.join(cells)} | {row.slope:+.2f} |")
    lines += ["", f"![RMS change over width]({figure})"]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[ActivationRow]) -> Figure:
    """Changes over width on logarithmic axes, one panel for each activation."""
    figure = Figure(figsize=(3 * len(PARTS), 3), layout="constrained")
    panels = figure.subplots(1, len(PARTS))
    for panel, part in zip(panels, PARTS, strict=True):
        for row in rows:
            if row.part == part:
                label = f"{row.kind} ({row.slope:+.2f})"
                panel.plot(list(row.changes), list(row.changes.values()), marker="o", label=label)
        panel.set(xscale="log", yscale="log", xlabel="width", title=part)
        panel.set_xticks(list(rows[0].changes), [str(width) for width in rows[0].changes])
        panel.minorticks_off()
        panel.legend()
    panels[0].set_ylabel("RMS change")
    return figure


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument(
        "--grow", choices=("heads", "features"), default="heads", help="what increases with the width"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("coordinate_check"), help="path without a suffix")
    given = parser.parse_args()
    if len(set(given.widths)) < 2 or any(width % HEAD or width < 2 * HEAD for width in given.widths):
        raise TrainingError(f"--widths: set at least two different multiples of {HEAD} from {2 * HEAD} on")
    if min(given.steps, given.seeds) < 1 or not given.lr > 0:
        raise TrainingError("--steps and --seeds must be at least 1, --lr above 0")
    optimizer = OPTIMIZERS[given.optimizer](given.lr)
    rows = check(sorted(set(given.widths)), optimizer, grow=given.grow, steps=given.steps, seeds=given.seeds)
    command = " ".join(["python", "scripts/checks/coordinate_check.py", *sys.argv[1:]])
    page = table(rows, command, given.out.with_suffix(".png").name)
    print(page)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out.with_suffix(".md"), page)
    records = [
        {"parametrization": row.kind, "activation": row.part, "width": width, "rms_change": change}
        for row in rows
        for width, change in row.changes.items()
    ]
    write_table(given.out.with_suffix(".csv"), records)
    draw(rows).savefig(given.out.with_suffix(".png"), dpi=150)
    return 0


if __name__ == "__main__":
    run_main(main)
