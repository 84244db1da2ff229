"""Two-process runs in which one process is killed, hangs, gets a signal, or computes non-finite
values."""

import json
import signal
from functools import cache
from pathlib import Path

import pytest

from data import prepare
from errors import FAILED, INTERRUPTED, RANK_LOST, REQUEUE
from run_directory.checkpoints import steps_of
from run_directory.console import Console
from run_directory.metrics_file import read_metrics
from run_directory.parent_run import read_run_settings
from tests.processes import ScriptProcess
from tests.training.conftest import ROOT, environment
from tests.training.distributed.ranks import BUSY, HOST_TIMEOUT, TIMEOUT

WORDS = [
    *("train_length=24", "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
    *("data.source.name=files", "data.tokenizer.name=bytes", "data.valid_fraction=0.2"),
    *("training.tokens=1536", "training.batch_size=8", "training.checkpoint.interval=3"),
    *("training.validation={interval: null, spans: 4, targets: 8}", "training.samples.prompts=[]"),
    "training.precision=float32",
]


def run_scenarios(module: str, folder: Path, words: list[str]) -> dict:
    """What a module of this folder writes to `folder`, run as a script in a process that may
    fork."""
    script = f"tests/training/distributed/{module}.py"
    process = ScriptProcess(script, words, ROOT, folder / "out", folder / "err", environment())
    assert process.wait(400) == 0, (folder / "err").read_text()
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def scenarios(corpus, prepared_root, tmp_path_factory):
    """Run the scenarios `quick` or `slow` once; returns their folder and results."""
    overrides = [*WORDS, f"data.source.path={corpus}", f"data.root={prepared_root}"]
    prepare(read_run_settings(overrides)[0].data, Console(quiet=True))

    @cache
    def results(which: str) -> tuple[Path, dict]:
        folder = tmp_path_factory.mktemp(which)
        return folder, run_scenarios("ranks", folder, [which, str(folder), *overrides])

    return results


@pytest.fixture
def results(scenarios, request) -> tuple[Path, dict]:
    return scenarios("slow" if request.node.get_closest_marker("slow") else "quick")


def lines(folder: Path) -> list[dict]:
    return read_metrics(folder / "metrics.jsonl", "train")


def test_non_finite_gradient_on_one_rank_skips_all_ranks(results):
    folder = results[0]
    found = results[1]["poisoned"]
    assert found["statuses"] == [0, 0], found["logs"]
    zero, one = found["weights"]
    assert zero == one and len(zero) == 8  # after every step
    assert zero[2] == zero[1] and zero[4] == zero[3] and len(set(zero)) == 6
    skipped = {
        line["step"]: line["skipped"] for line in lines(folder / "poisoned") if "skipped" in line
    }
    assert skipped == {3: "not finite", 5: "not finite"}
    third = lines(folder / "poisoned")[2]
    fifth = lines(folder / "poisoned")[4]
    assert (
        isinstance(third["loss"], float) and third["grad_norm"] == "nan" and fifth["loss"] == "inf"
    )
    assert (
        "step 3 is skipped, not finite" in found["logs"][0]
        and "number 2 of the run" in found["logs"][0]
    )


def test_signal_to_one_rank_saves_and_requeues_all_ranks(results):
    folder = results[0]
    found = results[1]["signalled"]
    assert found["statuses"] == [REQUEUE, REQUEUE], found["logs"]
    assert "stopped by" in found["logs"][0] and "to resume" in found["logs"][0]
    # nothing is lost
    assert steps_of(folder / "signalled") == [lines(folder / "signalled")[-1]["step"]]


def test_error_on_one_rank_is_not_requeued(results):
    found = results[1]["failing"]
    assert found["statuses"] == [FAILED, FAILED], found["logs"]
    main, other = (log.strip().splitlines()[-1] for log in found["logs"])
    error = f"{results[0] / 'failing' / 'metrics.jsonl'}: its last line is not a line of metrics; remove it"
    assert main == f"error: {error}"
    assert other == f"error: (process 1) process 0 could not begin: {error}"


def test_error_after_last_step_stops_all_ranks(results):
    found = results[1]["failing last"]
    assert found["statuses"] == [FAILED, FAILED], found["logs"]
    assert "error: failed last" in found["logs"][0]
    assert "error: (process 1) process 0: failed last" in found["logs"][1]


@pytest.mark.parametrize("failing", [0, 1])
def test_error_in_the_loop_of_one_rank_ends_all_ranks_with_its_message(results, failing):
    found = results[1][f"failing in the loop {failing}"]
    assert found["statuses"] == [FAILED, FAILED], found["logs"]
    for log in found["logs"]:
        assert log.count("error: ") == 1 and "shard 7 cannot be read" in log
    assert f"process {failing}: shard 7" in found["logs"][1 - failing]
    assert found["seconds"] < BUSY  # no collective waits for its time-out


def test_several_processes_are_refused_where_the_text_is_not_prepared(results):
    found = results[1]["unprepared"]
    assert found["statuses"] == [FAILED, FAILED] and not found["left"], found["logs"]
    assert "2 processes were started" in found["logs"][0]
    assert "python scripts/prepare.py train_length=24" in found["logs"][0]
    assert all("Traceback" not in log for log in found["logs"])


def test_run_that_others_train_is_refused_with_the_process_that_holds_it(results):
    found = results[1]["contended"]
    assert found["statuses"] == [FAILED, FAILED], found["logs"]
    for log in found["logs"]:
        assert f"is being trained by process {found['holder']} on " in log
        assert "a stopped process keeps its lock" in log


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param("killed", signal.SIGKILL, marks=pytest.mark.slow),
        ("stopped", signal.SIGSTOP),
        pytest.param("killed in a gather", signal.SIGKILL, marks=pytest.mark.slow),
        ("stopped in a gather", signal.SIGSTOP),
    ],
)
def test_lost_rank_is_detected_and_resumes_from_checkpoint(results, name, number):
    folder = results[0]
    found = results[1][name]
    assert found["statuses"] == [RANK_LOST, -signal.SIGKILL], found["logs"]
    text = found["logs"][0]
    assert "error: (process 0) " in text and "resume from the last checkpoint" in text
    if number == signal.SIGSTOP:
        assert "another process hangs" in text
        assert TIMEOUT / 2 < found["seconds"] < TIMEOUT + BUSY
    else:
        assert "another process has ended" in text and found["seconds"] < TIMEOUT + BUSY
    run = folder / name.replace(" ", "-")
    # A checkpoint was due after every step: at most the one under way is lost.
    assert lines(run)[-1]["step"] - steps_of(run)[-1] <= 1


@pytest.mark.parametrize(
    ("name", "number"),
    [("killed", signal.SIGKILL), pytest.param("stopped", signal.SIGSTOP, marks=pytest.mark.slow)],
)
def test_lost_rank_before_first_step_is_detected(results, name, number):
    """The main rank worked for longer than a step may take, then the other was lost."""
    found = results[1][f"{name} early"]
    assert found["statuses"] == [RANK_LOST, -signal.SIGKILL] and found["steps"] == 0, found["logs"]
    text = found["logs"][0]
    assert "error: (process 0) " in text and text.count("error: ") == 1 and found["logs"][1] == ""
    if number == signal.SIGSTOP:
        assert "another process hangs" in text
        assert HOST_TIMEOUT / 2 < found["seconds"] < HOST_TIMEOUT + BUSY
    else:
        assert "another process has ended" in text and found["seconds"] < TIMEOUT + BUSY
    assert not (results[0] / f"{name}-early" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [pytest.param("signalled", REQUEUE, "stopped by SIGTERM before the first step: nothing to save",
                  marks=pytest.mark.slow),
     ("interrupted", INTERRUPTED, "interrupted")],
)  # fmt: skip
def test_signal_before_first_step_exits_immediately(results, name, status, message):
    found = results[1][f"{name} early"]
    assert found["statuses"] == [status, status], found["logs"]
    assert found["seconds"] < BUSY and not found["left"]
    assert all(message in log and "Traceback" not in log for log in found["logs"])
