"""Under muP, activations change equally at every width; without it, they do not."""

import pandas as pd
import pytest

from scripts.checks import coordinate_check
from scripts.checks.coordinate_check import OPTIMIZERS, PARTS, check, slope

WIDTHS = [32, 64, 128]


@pytest.mark.parametrize(
    ("optimizer", "grow"), [("adamw", "heads"), ("adamw", "features"), ("muon", "heads")]
)
def test_updates_grow_with_width_without_mup_only(optimizer, grow):
    table = check(WIDTHS, OPTIMIZERS[optimizer](0.01), grow=grow, steps=3, seeds=1)
    assert len(table) == 2 * len(PARTS)
    for (kind, part), row in table.iterrows():
        growth = slope(row)
        assert growth > 0.35 if kind == "standard" else abs(growth) < 0.3, (kind, part, growth)
    assert slope(pd.Series({n: 3 * n**0.7 for n in WIDTHS})) == pytest.approx(0.7)


def test_script_writes_table_and_figure(monkeypatch, tmp_path):
    small = ["--widths", "48", "32", "--steps", "1", "--seeds", "1"]
    out = tmp_path / "check"
    monkeypatch.setattr("sys.argv", ["coordinate_check.py", *small, "--out", str(out)])
    assert coordinate_check.main() == 0
    rows = pd.read_csv(out.with_suffix(".csv"))
    at_base = rows[rows.width == 32].rms_change.tolist()  # both are the same model
    assert len(rows) == 16 and (rows.rms_change > 0).all() and at_base[:4] == at_base[4:]
    assert out.with_suffix(".png").stat().st_size > 10_000 and out.with_suffix(".md").exists()
