"""Training curves read from metrics.jsonl, and the script that draws them."""

import csv
import math
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from data.files import write_json
from errors import StudyError
from run_directory.metrics_file import MetricsFile
from run_directory.run import MANIFEST
from scripts.plots import plot_run
from studies.report.training_figure import thinned, token_counts, training_figure
from studies.results.training_curves import centred_mean, names_of, read_curves


def make_run(
    folder, steps=range(1, 41), length=16, tokenizer="a", loss=lambda step: 8 / step, lineage=()
):
    """A run directory as training leaves it: killed after the last step and resumed at half of it."""
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(
        f"train_length: {length}\ntraining: {{validation: {{targets: 8}}}}\n"
    )
    write_json(folder / MANIFEST, {"format": 1, "tokenizer_hash": tokenizer, "lineage": lineage})
    half = steps[len(steps) // 2]

    def metrics(step, factor=1.0):
        return {"loss": factor * loss(step), "lr": 1e-3 * step, "tokens": 100 * step, "data": "x"}

    with MetricsFile(folder / "metrics.jsonl", 0) as log:
        for step in steps:
            log.write(step, **metrics(step, factor=100.0))
    with MetricsFile(folder / "metrics.jsonl", 0) as log:
        for step in (step for step in steps if step <= half):
            log.write(step, **metrics(step))
    with MetricsFile(folder / "metrics.jsonl", half) as log:
        for step in (step for step in steps if step > half):
            log.write(step, **metrics(step))
            if step % 10 == 0:
                log.write(
                    step, "validation", nll={length: 2.0, 2 * length: 3.0 + step / 100}, targets=64
                )
        log.write(half + 5, "change", overrides=["model.position.scaling={name: drop}"])
        log.write(half + 9, "change", overrides=[], length=2 * length, batch_size=4)
        log.write(half + 10, "change", overrides=[])  # the learning rate rises again
    return folder


def texts(figure) -> str:
    return "\n".join(found.get_text() for found in figure.findobj(Text))


def test_the_last_line_of_a_step_counts(tmp_path):
    run = read_curves(
        make_run(tmp_path / "run", loss=lambda step: math.inf if step == 30 else 8 / step), "r"
    )
    assert run.steps.tolist() == list(range(1, 41)) and run.train_length == 16
    # none of the first attempt's
    assert run.loss[:29].tolist() == [8 / step for step in range(1, 30)]
    assert np.flatnonzero(np.isnan(run.loss)).tolist() == [29] and run.skipped == [30]
    assert set(run.attempts[:21]) == {2} and set(run.attempts[21:]) == {3}
    assert run.resumed == [0, 21] and run.changes == [(26, "model.position.scaling={name: drop}")]
    assert run.resized == [(30, 32)] and run.forked == []
    assert run.held_out == {16: [(30, 2.0), (40, 2.0)], 32: [(30, 3.3), (40, 3.4)]}
    assert [run.tokens_at(step) for step in (0, 0.5, 26, 40)] == [0, 50, 2600, 4000]


def test_moving_means_equal_a_loop_and_do_not_cross_changes(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=23)
    values[[4, 5, 6, 22]] = math.nan
    for width in (1, 2, 3, 8, 60):
        for place, mean in enumerate(centred_mean(values, width)):
            low = place - (width - 1) // 2
            near = [v for i, v in enumerate(values) if low <= i < low + width and not math.isnan(v)]
            assert math.isnan(mean) if not near else mean == pytest.approx(np.mean(near))
    run = read_curves(make_run(tmp_path / "run", loss=lambda step: 1.0 if step <= 26 else 5.0), "r")
    smooth, width = run.smoothed(0.5)
    assert width == 20 and smooth.tolist() == [1.0] * 26 + [5.0] * 14
    run = read_curves(
        make_run(tmp_path / "long", loss=lambda step: 1.0 if step <= 30 else 5.0), "r"
    )
    assert run.smoothed(0.5)[0].tolist() == [1.0] * 30 + [5.0] * 10


def test_plot_run_writes_the_figure_and_its_numbers(tmp_path, monkeypatch, capsys):
    one = make_run(tmp_path / "a" / "run", steps=range(1, 41))
    other = make_run(
        tmp_path / "b" / "run", steps=range(1, 21), loss=lambda step: 4.0, tokenizer="b"
    )
    monkeypatch.setattr(
        sys, "argv", ["plot_run.py", str(one), str(other), "--out", str(tmp_path / "f" / "x.png")]
    )
    assert plot_run.main() == 0
    output = capsys.readouterr().err
    assert "the tokenizers differ" in output
    assert [f"{tmp_path}/f/x.{end}" in output.splitlines() for end in ("png", "svg", "csv")] == [
        True
    ] * 3
    assert (tmp_path / "f" / "x.png").stat().st_size > 10_000 and (
        tmp_path / "f" / "x.svg"
    ).exists()
    with open(tmp_path / "f" / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"a/run", "b/run"}
    found = {
        (row["measure"], row["length"], row["step"]): row for row in rows if row["run"] == "a/run"
    }
    assert (
        float(found["loss", "", "40"]["value"]) == 0.2
        and found["loss", "", "40"]["tokens"] == "4000"
    )
    assert float(found["held_out", "32", "40"]["value"]) == 3.4
    assert found["change", "", "26"]["value"] == "model.position.scaling={name: drop}"
    assert ("change", "", "31") not in found and ("window", "32", "30") in found

    runs = [read_curves(folder, name) for folder, name in ((one, "one"), (other, "other"))]
    output = texts(training_figure(runs, 0.02))
    for part in (
        "one  0.200",
        "other  4.000",
        "held out, 1 × L0 = 16",
        "2 × L0 = 32",
        "tokenizers differ",
    ):
        assert part in output, part
    assert "| resumed" in output and "change of positions" in output and "skipped" not in output
    assert (
        "dotted: change of the window length" in output
        and "32" in output.splitlines()
        and "fork" not in output
    )
    alone = texts(training_figure(runs[:1], 0.02))
    assert "16 (1 × L0)  2.000" in alone and "32 (2 × L0)  3.400" in alone


def test_the_start_of_a_fork_is_marked(tmp_path):
    lineage = [{"run": "runs/stem", "step": 20, "fork": True}, {"run": "runs/first", "step": 3}]
    fork = read_curves(make_run(tmp_path / "fork", steps=range(21, 41), lineage=lineage), "fork")
    branch = read_curves(make_run(tmp_path / "branch", lineage=lineage[1:]), "branch")
    assert fork.forked == [(20, "stem")] and branch.forked == []
    figure = training_figure([fork], 0.02)
    assert "a fork of stem after step 20" in texts(figure) and "○ start of a fork" in texts(figure)
    (mark,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert mark.get_xdata().tolist() == [2100] and mark.get_ydata().tolist() == [8 / 21]


@pytest.mark.parametrize(("first", "left"), [(3.0, False), (40.0, True)])
def test_clipped_lines_are_annotated_with_their_first_value(tmp_path, first, left):
    """From step 4 on, a tenth of the tokens, the loss falls from 2 to 1."""
    run = read_curves(
        make_run(tmp_path / "run", loss=lambda s: first if s < 4 else 2 - s / 40), "run"
    )
    axes = training_figure([run], 0).axes[0]
    low, high = axes.get_ylim()
    assert low < 1 and (high > first) == (not left)
    assert ("↑ from 40.00" in [text.get_text() for text in axes.texts]) == left


def test_invalid_runs_are_rejected(tmp_path):
    with pytest.raises(StudyError, match="no such run directory"):
        read_curves(tmp_path / "none", "x")
    write_json(tmp_path / MANIFEST, {"format": 1})
    with pytest.raises(StudyError, match="no trained step"):
        read_curves(tmp_path, "x")
    with pytest.raises(StudyError, match="duplicate run"):
        names_of([tmp_path, tmp_path / "a" / ".."])
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    runs = [tmp_path / name for name in ("tiny-0123456789", "tiny-alibi-abcdef0123", "tiny-rope")]
    assert names_of(runs) == ["tiny", "tiny-alibi", "tiny-rope"]
    runs[1] = tmp_path / "tiny-abcdef0123"
    assert names_of(runs) == ["tiny-0123456789", "tiny-abcdef0123", "tiny-rope"]


def test_thinning_keeps_minima_and_maxima():
    rng = np.random.default_rng(0)
    x = np.arange(100_000.0)
    y = rng.normal(size=100_000)
    y[500:600] = math.nan
    short, drawn = thinned(x, y)
    assert len(short) == len(drawn) == 8000 and (short[0], short[-1]) == (0, 99_999)
    assert (np.diff(short) >= 0).all()
    assert (np.nanmin(drawn), np.nanmax(drawn)) == (np.nanmin(y), np.nanmax(y))
    assert np.isnan(drawn[40:48]).all() and np.isfinite(np.delete(drawn, np.s_[40:48])).all()
    assert (
        thinned(x[:8000], y[:8000])[1] is not None and len(thinned(x[:8000], y[:8000])[0]) == 8000
    )


@pytest.mark.parametrize(
    ("most", "label"),
    [(999, "999"), (1e3, "1k"), (999e3, "999k"), (1e6, "1M"), (1e9, "1B"), (1e12, "1T")],
)
def test_the_token_axis_uses_the_largest_unit(most, label):
    axes = Figure().add_subplot()
    token_counts(axes, most)
    assert axes.xaxis.get_major_formatter()(most) == label
