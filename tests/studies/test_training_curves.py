"""Training curves read from metrics.jsonl, and the script that draws them."""

import math
import sys
from contextlib import closing

import pandas as pd
import pytest

from data.files import write_json
from errors import ConfigError, StudyError, TrainingError
from run_directory.run import MANIFEST, model_hash
from run_directory.run_names import names_of
from scripts.plots import plot_run
from studies.training_figure import read_curves, training_figure
from tests.artists import ends
from training.metrics import MetricsFile


def make_run(folder, steps=40, tokenizer="a", loss=lambda step: 8 / step, lineage=()):
    """A run directory as training leaves it: killed after the last step and resumed at half of
    it."""
    folder.mkdir(parents=True)
    settings = "train_length: 16\ntraining: {validation: {targets: 8}}\n"
    (folder / "settings.yaml").write_text(settings)
    write_json(
        folder / MANIFEST,
        {
            "format": 1,
            "tokenizer_hash": tokenizer,
            "lineage": lineage,
            "model_hash": [model_hash((folder / "settings.yaml").read_text())],
        },
    )
    half = steps // 2

    def write(log, numbers, factor=1.0):
        for step in numbers:
            log.write(step, loss=factor * loss(step), lr=1e-3 * step, tokens=100 * step)

    with closing(MetricsFile(folder / "metrics.jsonl", 0)) as log:
        write(log, range(1, steps + 1), factor=100.0)
    with closing(MetricsFile(folder / "metrics.jsonl", 0)) as log:
        write(log, range(1, half + 1))
    with closing(MetricsFile(folder / "metrics.jsonl", half)) as log:
        write(log, range(half + 1, steps + 1))
        log.write(steps, "validation", nll={16: 2.0, 32: 3.4}, targets=64)
        log.write(half + 5, "change", overrides=["model.position.scaling={name: drop}"])
        log.write(half + 9, "change", overrides=[], length=32, batch_size=4)
        log.write(half + 10, "change", overrides=[])  # the learning rate rises again
    return folder


def values(run, measure):
    rows = run.of(measure)
    return dict(zip(rows.step, rows.value, strict=True))


def test_the_last_line_of_a_step_counts(tmp_path):
    folder = make_run(tmp_path / "run", loss=lambda step: math.inf if step == 30 else 8 / step)
    run = read_curves(folder, "r")
    losses = values(run, "loss")
    assert list(losses) == list(range(1, 41))
    assert math.isnan(losses[30])
    assert [losses[step] for step in range(1, 30)] == [8 / step for step in range(1, 30)]
    held_out = run.of("held_out")[["length", "step", "value"]].to_numpy().tolist()
    assert held_out == [[16, 40, 2.0], [32, 40, 3.4]]
    assert list(values(run, "resumed")) == [0, 20]
    assert values(run, "change") == {25: "model.position.scaling={name: drop}", 29: "32 tokens"}
    assert (run.table.tokens == 100 * run.table.step).all()


def test_losses_are_smoothed_over_centered_windows(tmp_path):
    run = read_curves(make_run(tmp_path / "other", loss=float), "r", 3 / 40)
    assert list(values(run, "loss_smoothed").values()) == [1.5, *map(float, range(2, 40)), 39.5]


def test_plot_run_writes_the_figure_and_its_numbers(tmp_path, monkeypatch, capsys):
    lineage = [{"run": "runs/stem", "step": 20, "fork": True}]
    folders = [make_run(tmp_path / "a" / "run", lineage=lineage)]
    folders.append(make_run(tmp_path / "b" / "run", steps=20, tokenizer="b"))
    out = tmp_path / "f" / "x.png"
    monkeypatch.setattr(sys, "argv", ["plot_run.py", *map(str, folders), "--out", str(out)])
    assert plot_run.main() == 0
    assert "tokenizers differ" in capsys.readouterr().err
    assert out.stat().st_size > 10_000
    rows = pd.read_csv(out.with_suffix(".csv"), dtype={"length": str}, keep_default_na=False)
    values = rows.set_index(["run", "measure", "length", "step"]).value
    assert float(values["a/run", "loss", "", 40]) == 0.2
    assert float(values["a/run", "held_out", "32", 40]) == 3.4
    assert values["a/run", "change", "", 29] == "32 tokens"
    assert values["a/run", "forked", "", 20] == "stem"
    axes = training_figure([read_curves(folders[0], "one")]).axes
    assert [end[:2] for end in ends(axes[0])] == [("one", "0.200")]
    assert 2 < axes[0].get_ylim()[1] < 8  # the first tenth of the tokens is clipped


def test_invalid_runs_are_rejected(tmp_path):
    with pytest.raises(TrainingError):
        read_curves(tmp_path / "none", "x")
    write_json(tmp_path / MANIFEST, {"format": 1})
    with pytest.raises(StudyError, match="no trained step"):
        read_curves(tmp_path, "x")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["tiny-0123456789", "tiny-alibi-abcdef0123"], ["tiny", "tiny-alibi"]),
        (["tiny-0123456789", "tiny-abcdef0123"], ["tiny-0123456789", "tiny-abcdef0123"]),
        (["a", "a/../a"], None),
    ],
)
def test_names_are_the_shortest_unique_ones(tmp_path, paths, names):
    folders = [tmp_path / path for path in paths]
    if names is None:
        with pytest.raises(ConfigError, match="duplicate run"):
            names_of(folders)
    else:
        assert names_of(folders) == names
