"""metrics.jsonl, Weights & Biases, lines of progress, and the output of scripts."""

import json
import math
import re
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import ConfigError, DataError, ModelError, TrainingError
from run_directory import console as module
from run_directory.checkpoints import save_weights
from run_directory.console import Console, duration
from run_directory.metrics_file import last_lines, read_metrics
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from settings.script import run_main
from tests.training.net import Net, RecordingConsole
from training.metrics import MetricsFile, ProgressLines, WandbLog, why_stopped
from training.step_guard import NOT_FINITE, SPIKE


def write(file, start, *steps, **values):
    with closing(MetricsFile(file, start)) as log:
        for step in steps:
            log.write(step, **values)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_records_round_trip(file):
    with closing(MetricsFile(file, 0)) as log:
        log.write(1, loss=0.1 + 0.2, nested={"a": [1, 2.5]}, text="é")
        log.write(2, loss=math.nan, norm=-math.inf)
        log.write(2, "validation", nll={256: 3.5})
    start, first, second, validation = read_metrics(file)
    place = {"kind": "train", "step": 1, "attempt": 1}
    assert start == {"kind": "start", "step": 0, "attempt": 1}
    assert first == place | {"loss": 0.1 + 0.2, "nested": {"a": [1, 2.5]}, "text": "é"}
    assert (second["loss"], second["norm"]) == ("nan", "-inf")
    assert read_metrics(file, "validation") == [validation]
    assert validation["nll"] == {"256": 3.5}


@given(st.integers(1, 200))
@settings(max_examples=60)
def test_truncated_file_is_readable_and_appendable(tmp_path_factory, removed):
    file = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    write(file, 0, *range(1, 6), loss=1 / 7)
    content = file.read_bytes()
    file.write_bytes(content[: max(0, len(content) - removed)])
    kept = [line["step"] for line in read_metrics(file, "train")]
    assert kept == list(range(1, len(kept) + 1))
    assert len(kept) >= file.read_bytes().count(b"\n") - 1
    write(file, len(kept), len(kept) + 1)
    assert [line["step"] for line in read_metrics(file, "train")] == [*kept, len(kept) + 1]
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_start_supersedes_later_steps_of_all_earlier_attempts(file):
    for start, stop in (
        (0, 9),
        (6, 12),
        (3, 5),
    ):
        write(file, start, *range(start + 1, stop + 1))
    held = [(line["step"], line["attempt"]) for line in read_metrics(file, "train")]
    assert held == [(1, 1), (2, 1), (3, 1), (4, 3), (5, 3)]
    assert last_lines(file)["train"]["step"] == 5
    assert last_lines(file.with_name("none")) == {}


@pytest.mark.parametrize("line", [b"{oops\n", b'{"kind": "train", "step": "1", "attempt": 1}\n'])
def test_corrupted_line_is_named(file, line):
    write(file, 0, 1)
    content = file.read_bytes()
    file.write_bytes(line + content)
    with pytest.raises(TrainingError, match=r"metrics.jsonl:1: not a line of metrics"):
        read_metrics(file)
    file.write_bytes(content + line)
    with pytest.raises(TrainingError, match=r"metrics.jsonl:3: not a line of metrics"):
        MetricsFile(file, 1)


@pytest.mark.parametrize(
    ("saved", "reason", "count", "message"),
    [
        ([2, 5], NOT_FINITE, 1, "step 5 is saved: .*on_nonfinite.name=skip"),
        ([], NOT_FINITE, 4, "number 4 of the run.*raise training.on_nonfinite.limit"),
        ([], SPIKE, 3, "spike number 3 of the run.*raise training.on_spike.limit"),
    ],
)
def test_error_of_a_stopped_run_names_the_checkpoint_and_a_fix(
    tmp_path, saved, reason, count, message
):
    for step in saved:
        save_weights(tmp_path, step, Net())
    scalars = {"loss": math.nan, "grad_norm": 2.0, "reason": float(reason), "count": float(count)}
    text = why_stopped(tmp_path, 7, scalars)
    assert re.search(f"step 7: the loss is nan.*{message}", text)


# Weights & Biases

LINES = (
    {"kind": "train", "step": 1, "attempt": 1, "loss": 2.0},
    {
        "kind": "validation",
        "step": 1,
        "attempt": 1,
        "nll": {"256": 3.0, "512": "nan"},
    },
    {"kind": "train", "step": 2, "attempt": 1, "loss": 1.0},
    {"kind": "train", "step": 3, "attempt": 1, "loss": 1.0},
)


def wandb_log(folder, console, *words):
    settings = load_settings(RunSettings, [f"training.{word}" for word in words])
    return WandbLog(settings, folder, console)


def test_wandb_logs_steps_and_is_disabled_after_error(tmp_path, monkeypatch):
    sent = []
    metrics = []
    calls = {}

    def log(values):
        if len(sent) == 2:
            raise ConnectionError("no route\nmore")
        sent.append(values)

    run = SimpleNamespace(log=log, finish=lambda: None)
    run.define_metric = lambda *names, **options: metrics.append((names, options))
    wandb = SimpleNamespace(init=lambda **options: calls.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    console = RecordingConsole()
    tracker = wandb_log(tmp_path / "run-1", console, "wandb.mode=offline", "wandb.project=p")
    for line in LINES:
        tracker.write(line)
    tracker.close()
    assert sent == [
        {"train/loss": 2.0, "step": 1, "attempt": 1},
        {"validation/nll/256": 3.0, "validation/nll/512": "nan", "step": 1, "attempt": 1},
    ]
    assert metrics == [(("step",), {}), (("*",), {"step_metric": "step"})]
    assert (calls["project"], calls["mode"], calls["name"]) == ("p", "offline", "run-1")
    # schedulers kill what has not ended by then
    assert 0 < calls["settings"]["finish_timeout"] < 30
    assert calls["settings"]["finish_timeout_raises"]
    assert console.lines == ["wandb is disabled; training continues: no route"]


# Lines of progress


def test_a_line_for_each_speed_and_validation(capsys):
    progress = ProgressLines(steps=2000, tokens=2_000_000, console=Console())
    step = {"kind": "train", "step": 1000, "loss": 3.0, "grad_norm": 0.25, "lr": 1.5e-3}
    speed = {"tokens": 2_000_000 - 754 * 14_200, "tokens_per_second": 14_200.0, "mfu": 0.42}
    progress.write(step)
    progress.write(step | speed)
    for nll in ({"256": 3.5, "1024": 3.7}, {"256": 3.4, "1024": 3.75}):
        facts = {"targets": 2048, "documents": 32}
        progress.write({"kind": "validation", "step": 500, "nll": nll, **facts})
    first, _, before, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1000/2000  loss  3.0000")
    assert first.endswith("14,200 tokens/s  MFU 42%  12 min 34 s left")
    assert "256: 3.5000  1024: 3.7000" in before
    assert "256: 3.4000 (-0.1000)  1024: 3.7500 (+0.0500)" in last


# Output of scripts


def end_of(main, capsys):
    """Exit status and standard error of a script with this `main`."""
    with pytest.raises(SystemExit) as end:
        run_main(main)
    return end.value.code, capsys.readouterr().err


def raising(error):
    def main():
        raise error

    return main


def test_tables_go_to_stdout(capsys):
    Console().table("A title", ["name", "nll"], [["rope [1]", 2.5], ["alibi", "−10.25"]])
    out, err = capsys.readouterr()
    assert err == ""
    assert "A title" in out
    first, second = [line for line in out.splitlines() if "rope [1]" in line or "alibi" in line]
    assert first.index("2.5") > second.index("−10.25")  # right-aligned


def test_lines_go_to_stderr_with_escaped_control_characters(capsys):
    hostile = "a\x1b[2Jb\x9bc\rd\udcff\u202ee\x00\tf\ng é天 [not markup]"
    shown = "a\\x1b[2Jb\\x9bc\\rd\\udcff\\u202ee\\x00\tf\ng é天 [not markup]"
    console = Console()
    console.info(hostile)
    console.warn(hostile)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{shown}\nwarning: {shown}\n")
    assert end_of(raising(DataError(hostile)), capsys) == (2, f"error: {shown}\n")
    console.table("\x1b[1m", ["a\x1b"], [["x\x1b[2J"]])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "x\\x1b[2J" in out


def test_progress_lines_without_terminal(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Console().bar("train", 200, "step") as bar:
        for _ in range(40):
            now[0] += 1
            bar.advance(5)
    *steps, last = capsys.readouterr().err.splitlines()
    assert last == "train: 200 step in 40 s"
    assert steps == [
        "train: 25% of 200 step, 30 s left, 5 step/s",
        "train: 50% of 200 step, 20 s left, 5 step/s",
        "train: 75% of 200 step, 10 s left, 5 step/s",
    ]


@pytest.mark.parametrize(("step", "rate"), [(0.044, "0.044"), (0.5, "0.5"), (1234.5, "1,234")])
def test_progress_lines_show_slow_and_fast_rates(step, rate, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Console().bar("compare", 1e6, "Mtok") as bar:
        for _ in range(10):
            now[0] += 1
            bar.advance(step)
    assert capsys.readouterr().err.splitlines()[0].endswith(f" left, {rate} Mtok/s")


def test_duration():
    for seconds, text in {
        9.94: "9.9 s", 9.96: "10 s", 59.6: "1 min 0 s", 100: "1 min 40 s",
        7300: "2 h 1 min", 359_000: "99 h 43 min", 1e6: "12 days", 1.3e11: "4,119 years",
    }.items():  # fmt: skip
        assert duration(seconds) == text


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        *((kind("the fix"), 2, "error: the fix\n") for kind in (ConfigError, ModelError)),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: a.txt: No such file\n"),
        (OSError("odd"), 2, "error: odd\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_user_errors_end_with_one_line(error, status, message, capsys):
    assert end_of(raising(error), capsys) == (status, message)


def test_status_of_a_main_that_returns_and_traceback_of_bugs(capsys):
    for value, status in ((None, 0), (3, 3)):
        assert end_of(lambda value=value: value, capsys) == (status, "")
    for bug in (ValueError("shape"), KeyError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")):
        with pytest.raises(type(bug)):
            run_main(raising(bug))
