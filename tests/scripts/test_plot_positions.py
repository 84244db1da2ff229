"""scripts/plots/plot_positions.py: its files, its options, and its errors."""

from types import SimpleNamespace

import pandas as pd
import pytest

from evaluation.schemes.scheme_figures import FIGURES
from model import ModelSettings, Transformer
from scripts.plots import plot_positions

SMALL = ["--dim", "8", "--dpi", "50"]


@pytest.fixture
def plot(call, tmp_path):
    def run(*words: str, folder: str = "out"):
        out = tmp_path / folder
        call(plot_positions.main, *words, "--out", out)
        return out

    return run


def test_script_writes_figures_reproducibly(plot, monkeypatch):
    words = ["decay", *SMALL, "--train-length", "64", "--distance", "8"]
    first, second = (plot(*words, folder=folder) for folder in "ab")
    files = sorted(path.name for path in first.iterdir())
    assert files == ["decay.csv", "decay.png", "decay.svg"]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    header = (first / "decay.png").read_bytes()[:24]
    assert int.from_bytes(header[16:20], "big") == 360  # pixels of 7.2 inches
    rows = pd.read_csv(first / "decay.csv")
    assert (rows[rows.distance == 0].bound == 2.5).all()  # (1 + 2 + 3 + 4) / 4 pairs
    monkeypatch.setattr(plot_positions, "save", lambda figure, out, name, dpi: None)
    out = plot(*words[1:], folder="all")
    assert {path.stem for path in out.iterdir()} == set(FIGURES)


def test_custom_schemes_and_trained_runs_are_plotted(plot, monkeypatch):
    settings = ModelSettings(dim=16, layers=1, heads=4, position={"name": "alibi"})
    loaded = SimpleNamespace(model=Transformer(settings, 20, 32))
    opened = SimpleNamespace(load=lambda: loaded)
    monkeypatch.setattr(plot_positions.Run, "open", lambda folder: opened)
    run = ["--run", "runs/mine", "--heads", "4", "--head", "1", "--train-length", "32"]
    rows = pd.read_csv(plot("biases", *run, "--dpi", "50") / "biases.csv")
    mine = rows[rows.scheme.str.startswith("mine")]
    assert mine.bias_nats.tolist() == pytest.approx((-mine.distance / 16).tolist())
    yaml = "{name: rope, theta: 100, scaling: {name: linear, factor: 2}}"
    out = plot("decay", *SMALL, "--scheme", yaml, "--scheme", "rope")
    labels = set(pd.read_csv(out / "decay.csv").scheme)
    assert labels == {"rope, theta 100, scaling linear", "rope"}
