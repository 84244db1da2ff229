"""Under muP, activations change equally at every width; without it, they do not."""

import csv
import sys

import pandas as pd
import pytest

from errors import TrainingError
from scripts.checks import coordinate_check
from scripts.checks.coordinate_check import OPTIMIZERS, check, main, slope
from tests.artists import close, labelled

WIDTHS = [32, 64, 128]


@pytest.mark.parametrize(
    ("optimizer", "grow"), [("adamw", "heads"), ("adamw", "features"), ("muon", "heads")]
)
def test_updates_grow_with_width_without_mup_only(optimizer, grow):
    table = check(WIDTHS, OPTIMIZERS[optimizer](0.01), grow=grow, steps=3, seeds=1)
    assert len(table) == 2 * len(coordinate_check.PARTS)
    for (kind, part), row in table.iterrows():
        found = slope(row)
        assert found > 0.35 if kind == "standard" else abs(found) < 0.3, (kind, part, found)


def test_power_law_slope():
    assert slope(pd.Series({width: 3 * width**0.7 for width in WIDTHS})) == pytest.approx(0.7)


def run(monkeypatch, *overrides):
    monkeypatch.setattr(sys, "argv", ["scripts/checks/coordinate_check.py", *overrides])
    return main()


def test_script_writes_table_and_figure(monkeypatch, tmp_path, capsys):
    out = tmp_path / "deep" / "check"
    small = ["--widths", "48", "32", "--steps", "1", "--seeds", "1"]
    assert run(monkeypatch, *small, "--out", str(out)) == 0
    page = out.with_suffix(".md").read_text()
    assert (
        page in capsys.readouterr().out
        and "| muP | logits |" in page
        and "| 32 | 48 | slope |" in page
    )
    with open(out.with_suffix(".csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and all(float(row["rms_change"]) > 0 for row in rows)
    # At the base width both are the same model.
    at_base = [row["rms_change"] for row in rows if row["width"] == "32"]
    assert at_base[:4] == at_base[4:]
    assert out.with_suffix(".png").stat().st_size > 10_000
    with pytest.raises(
        TrainingError, match=r"--widths: set at least two different multiples of 16"
    ):
        run(monkeypatch, "--widths", "40", "64")


def test_figure_shows_updates_by_width():
    found = {
        (kind, part): {32: n + 1.0, 64: (n + 1) * 2.0**m}
        for m, kind in enumerate(("standard", "muP"))
        for n, part in enumerate(coordinate_check.PARTS)
    }
    for n, axes in enumerate(coordinate_check.draw(pd.DataFrame(found).T).axes):
        assert axes.get_title() == coordinate_check.PARTS[n] and axes.get_xlabel() == "width"
        found = labelled(axes)
        close(found["standard (+0.00)"], (32, 64), (n + 1, n + 1))
        close(found["muP (+1.00)"], (32, 64), (n + 1, 2 * n + 2))
