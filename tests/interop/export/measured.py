"""Results of the slow tests of exports, from which scripts/docs/support_matrix.py writes its
cells."""

import tempfile
from pathlib import Path

import torch

from data.files import locked, write_json
from model import ModelSettings, TokenPositions, Transformer
from scripts.docs.support_matrix import RESULTS, ROWS, SIZES, measured, settings_digest


def trained(
    row: dict, vocab_size: int, length: int, text: torch.Tensor, steps: int = 20
) -> Transformer:
    """A model of a row of the support matrix after a few steps: no parameter has its initial value.

    Args:
        text: (B, length + 1) ids.
    """
    shape = ModelSettings.model_validate(SIZES | row)
    model = Transformer(shape, vocab_size, length).initialize(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = model(text[:, :-1], TokenPositions.plain(length), text[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def record(figures: dict[str, tuple[dict, str, float]]) -> None:
    """Replace the results of some rows. Tests in several processes may do so at the same time.

    Args:
        figures: row -> its settings, what was loaded, and the largest difference of a logit.
    """
    with locked(Path(tempfile.gettempdir(), "sextant-exports.lock"), wait=True):
        results = measured() | {
            row: {
                "settings": settings_digest(settings),
                "as": name,
                "difference": float(f"{difference:.0e}"),
            }
            for row, (settings, name, difference) in figures.items()
        }
        write_json(RESULTS, {row: results[row] for row in ROWS if row in results})
