"""scripts/plots/plot_positions.py: its files, its options, and its errors."""

import csv
import sys

import pytest

from errors import EvaluationError, TrainingError
from evaluation.schemes.figures import FIGURES
from model import ModelSettings, Transformer
from scripts.plots import plot_positions


def run(monkeypatch, *overrides: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_positions.py", *overrides])
    plot_positions.main()


def test_script_writes_figures_reproducibly(tmp_path, monkeypatch, capsys):
    overrides = ["--dim", "8", "--train-length", "64", "--distance", "8", "--dpi", "50"]
    for folder in ("a", "b"):
        run(monkeypatch, "decay", *overrides, "--out", str(tmp_path / folder))
    files = sorted((tmp_path / "a").iterdir())
    assert [path.name for path in files] == [f"decay.{kind}" for kind in ("csv", "png", "svg")]
    for path in files:
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes(), path.name
    with open(tmp_path / "a" / "decay.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    zero = [float(row["bound"]) for row in rows if row["distance"] == "0"]
    assert zero == pytest.approx([2.5] * len(zero))  # (1 + 2 + 3 + 4) / 4 pairs at every frequency
    saved = []
    monkeypatch.setattr(plot_positions, "save", lambda figure, out, name, dpi: saved.append(name))
    run(monkeypatch, *overrides, "--out", str(tmp_path / "all"))
    assert saved == list(FIGURES)
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        f"{name}.csv" for name in FIGURES
    }


def test_custom_schemes_and_trained_runs_are_plotted(tmp_path, monkeypatch):
    model = Transformer(
        ModelSettings(dim=16, layers=1, heads=4, position={"name": "alibi"}), 20, 32
    )
    monkeypatch.setattr(plot_positions, "load", lambda folder: type("Loaded", (), {"model": model}))
    overrides = [
        "biases",
        "--run",
        "runs/mine",
        "--heads",
        "4",
        "--head",
        "1",
        "--train-length",
        "32",
        "--dpi",
        "50",
    ]
    run(monkeypatch, *overrides, "--out", str(tmp_path))
    with open(tmp_path / "biases.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["scheme"].startswith("mine")]
    assert [float(row["bias_nats"]) for row in rows] == pytest.approx(
        [-int(row["distance"]) / 16 for row in rows]
    )
    yaml = "{name: rope, theta: 100, scaling: {name: linear, factor: 2}}"
    run(
        monkeypatch,
        "decay",
        "--dim",
        "8",
        "--dpi",
        "50",
        "--scheme",
        yaml,
        "--scheme",
        "rope",
        "--out",
        str(tmp_path),
    )
    with open(tmp_path / "decay.csv", newline="") as file:
        labels = {row["scheme"] for row in csv.DictReader(file)}
    assert labels == {"rope, theta 100, scaling linear", "rope"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decay", "--scheme", "alibi"], "'alibi' has no fixed frequencies; choose one of rope"),
        (["biases", "--scheme", "rope"], "rope adds no positional bias"),
        (["decay", "--scheme", "rop"], "unknown positional scheme 'rop'"),
        (["decay", "--scheme", "{name: rope, theta: -1}"], "scheme 'rope': theta: "),
    ],
)
def test_unsupported_figures_are_rejected(overrides, message, tmp_path, monkeypatch):
    with pytest.raises(EvaluationError, match=message):
        run(monkeypatch, *overrides, "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["waves"], "'waves'; known: encodings"),
        (["--dim", "two"], "'two' is not a whole number of at least 4"),
        (["--theta", "0.5"], "'0.5' is not a number of at least"),
        (["--scheme", "{theta: 3}"], "is not a scheme"),
        (["--scheme", "{"], "is not a scheme"),
        (["--head", "8"], "--head must be less than --heads 8"),
    ],
)
def test_invalid_overrides_are_rejected(overrides, message, monkeypatch):
    with pytest.raises(TrainingError) as caught:
        run(monkeypatch, *overrides)
    assert message in str(caught.value)
