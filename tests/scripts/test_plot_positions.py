"""scripts/plots/plot_positions.py: its files."""

import pandas as pd
import pytest

from scripts.plots import plot_positions


@pytest.fixture
def plot(call, tmp_path):
    def run(*words: str, folder: str = "out"):
        out = tmp_path / folder
        call(plot_positions.main, *words, "--out", out)
        return out

    return run


def test_script_writes_figures_reproducibly(plot, monkeypatch):
    first, second = (plot("decay", folder=folder) for folder in "ab")
    files = sorted(path.name for path in first.iterdir())
    assert files == ["decay.csv", "decay.png", "decay.svg"]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    header = (first / "decay.png").read_bytes()[:24]
    assert int.from_bytes(header[16:20], "big") == 936  # pixels of 7.2 inches
    rows = pd.read_csv(first / "decay.csv")
    assert (rows[rows.distance == 0].bound == 32.5).all()  # (1 + 2 + ... + 64) / 64 pairs
    monkeypatch.setattr(plot_positions, "save", lambda figure, out, name, dpi: None)
    out = plot(folder="all")
    assert {path.stem for path in out.iterdir()} == set(plot_positions.FIGURES)
