"""Measure whether trained runs use positions: the increase of their loss when position numbers are
permuted.

    python scripts/checks/probe_positions.py runs/quickstart
    python scripts/checks/probe_positions.py runs/studies/schemes/runs/* --out schemes.csv

For each run: NLL of the second half of 64 held-out windows of the trained length, its increase when
the position numbers of each window are permuted (the order of tokens and the attention mask are
unchanged) with the lower end of the 95% interval over windows, the parameters of the positional
scheme, and those that training has not changed. The increase is empty if no layer reads position
numbers.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data import open_prepared
from errors import TrainingError
from evaluation.reports.results_table import write_table
from model import SCHEMES, TokenPositions, Transformer
from run_directory.console import Console
from run_directory.run import LoadedRun, Run
from settings.script import Parser, run_main

WINDOWS = 64
SEED = 0


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directory",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.csv",
        help="also write the table as CSV",
    )
    options = parser.parse_args()
    console = Console()
    rows = [probe(Run.open(run).load(console=console)) for run in options.runs]
    shown = [
        [f"{x:.3f}" if isinstance(x, float) else str(x or "") for x in row.values()] for row in rows
    ]
    console.table(
        "loss with permuted positions, nats per token",
        list(rows[0]),
        shown,
    )
    if options.out:
        write_table(options.out, rows)
    return 0


def probe(run: LoadedRun) -> dict[str, Any]:
    """One row of the table."""
    model = run.model
    settings = run.settings
    rng = np.random.default_rng(SEED)
    plain, permuted = losses(model, held_out(run, rng), rng)
    added = plain.new_zeros(0) if permuted is None else permuted - plain
    low = None
    if added.any():  # bitwise equal: this variant of the scheme does not read positions
        low = float(added.mean() - 2.0 * added.std() / len(added) ** 0.5)
    fresh = Transformer(
        settings.model, model.vocab_size, settings.train_length, settings.original_length
    )
    start = dict(fresh.initialize(settings.seed).named_parameters())
    own = {
        name: weight for name, weight in model.named_parameters() if "position" in name.split(".")
    }
    return {
        "run": run.folder.name,
        "schemes": " ".join(sorted({kind.position.name for kind in model.kinds.values()})),
        "parameters": sum(weight.numel() for weight in own.values()),
        "unchanged": " ".join(
            name for name, weight in own.items() if torch.equal(weight, start[name])
        ),
        "nll": float(plain.mean()),
        "permuted": None if low is None else float(added.mean()),
        "permuted_low": low,
    }


def held_out(run: LoadedRun, rng: np.random.Generator) -> torch.Tensor:
    """(WINDOWS, L0 + 1) tokens of random held-out windows."""
    store = open_prepared(Run(run.folder).manifest["data"]).valid
    length = run.settings.train_length
    long = np.flatnonzero(store.lengths > length)
    if not len(long):
        raise TrainingError(f"{run.folder}: no held-out document is longer than {length} tokens")
    windows = []
    for document in rng.choice(long, WINDOWS):
        tokens = store.document(int(document))
        start = rng.integers(0, len(tokens) - length)
        windows.append(np.asarray(tokens[start : start + length + 1], dtype=np.int64))
    return torch.from_numpy(np.stack(windows))


@torch.no_grad()
def losses(
    model: Transformer, tokens: torch.Tensor, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(windows,) mean NLL of the second half of each window, and the same with permuted positions
    (None if no layer reads position numbers)."""
    length = tokens.shape[1] - 1
    plain = TokenPositions.plain(length)

    def nll(positions: list[TokenPositions]) -> torch.Tensor:
        scored = zip(tokens, positions, strict=True)
        losses = [model(row[None, :-1], where, targets=row[None, 1:])[0] for row, where in scored]
        return torch.stack(losses)[:, length // 2 :].double().mean(1)

    if not any(SCHEMES[kind.position.name][1].uses_position for kind in model.kinds.values()):
        return nll([plain] * len(tokens)), None
    orders = [torch.from_numpy(rng.permutation(length))[None] for _ in tokens]
    permuted = [replace(plain, position=order, unit_steps=False) for order in orders]
    return nll([plain] * len(tokens)), nll(permuted)


if __name__ == "__main__":
    run_main(main)
