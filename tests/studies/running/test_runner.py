"""Cells of a study are comparable: equal initial weights and equal data, both recorded."""

import json
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import DataError
from errors import StudyError
from model import Transformer
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from studies.results.stored import unfair_comparisons
from studies.running import runner
from studies.running.grid import GridCell
from studies.running.progress import _training
from studies.running.records import data_order, equal_tokens
from studies.running.slurm import indices, write_array
from studies.running.texts import StudyTexts
from studies.settings import StudySettings
from tests.studies.conftest import ROOT

NOVELS = load_settings(StudySettings, [str(ROOT / "configs" / "studies" / "novels.yaml")])


def start(label: str, seed: int) -> dict:
    files = [str(ROOT / word) for word in NOVELS.grid["scheme"][label]]
    settings = load_settings(
        RunSettings, [*files, "model.dim=32", "model.heads=4", "model.layers=4"]
    )
    model = Transformer(settings.model, 71, settings.train_length).initialize(seed)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("label", NOVELS.grid["scheme"])
def test_schemes_of_a_seed_start_from_the_same_weights(label):
    """All weights but those that positions learn; they are most of the model, and depend on the seed."""
    ours = start(label, 3)
    theirs = start("rope", 3)
    other = start("rope", 4)
    shared = ours.keys() & theirs.keys()
    # rotary positions learn nothing: all of their weights are shared
    assert shared == theirs.keys()
    assert all("position" in name for name in ours.keys() - shared)
    for name in shared:
        assert ours[name].equal(theirs[name]), name
    assert sum(not ours[name].equal(other[name]) for name in shared) >= 4 * 7  # the matrices


def entry(name: str, order: str, tokens: int = 100, seed: int = 0, **axes: str) -> dict:
    same = {"train_length": 8, "batch_size": 2, "data_hash": "d"}
    training = {"data_order": order, "tokens": tokens, "seed": seed, **same}
    return {"id": name, "axes": {"scheme": name, "seed": str(seed), **axes}, "training": training}


def test_different_batches_and_unequal_tokens_are_reported():
    fair = [
        entry("a", "x"),
        entry("b", "x"),
        entry("c", "y", seed=1),
        {"axes": {}, "training": None},
    ]
    assert [group["agree"] for group in data_order(fair)] == [True, True] and equal_tokens(fair)
    found = data_order([*fair, entry("d", "z")])
    assert [group["agree"] for group in found] == [False, True] and found[0]["cells"] == 3
    assert found[0]["orders"] == {"x": ["a", "b"], "z": ["d"]}
    more = [*fair, entry("d", "x", tokens=200)]
    assert all(group["agree"] for group in data_order(more)) and not equal_tokens(more)
    assert equal_tokens(
        [entry("a", "x", size="s"), entry("a", "z", tokens=200, size="m")]
    )  # the grid's own axis
    one, other = unfair_comparisons({"data_order": found, "equal_tokens": False})
    assert "seed 0" in one and "a, b; d" in one and "tokens" in other
    assert unfair_comparisons({"data_order": data_order(fair), "equal_tokens": True}) == []


def test_the_slurm_array_has_a_task_per_cell(tmp_path):
    cells = [GridCell(i, {"seed": str(i)}, ()) for i in (0, 1, 2, 5, 7, 8)]
    arguments = ["study.py", "a file.yaml", "report.tolerance=0.1", "--run-dir", str(tmp_path)]
    script = write_array(tmp_path, "tiny", cells, arguments, ["--partition=gpu", "--time=2:00:00"])
    text = script.read_text(encoding="utf-8")
    for line in ("--array=0-2,5,7-8", "--partition=gpu", "--time=2:00:00", "--job-name=tiny"):
        assert f"#SBATCH {line}\n" in text
    assert text.startswith("#!/bin/bash\n#SBATCH") and str(Path.cwd()) in text
    assert text.rstrip().endswith('--cell "$SLURM_ARRAY_TASK_ID"') and "'a file.yaml'" in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    # What a task runs is the study itself, with its own number.
    echo = text.replace("exec ", "exec echo ")
    message = subprocess.run(
        ["bash", "-c", echo],
        env={"SLURM_ARRAY_TASK_ID": "5"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert message.strip().endswith(
        f"study.py a file.yaml report.tolerance=0.1 --run-dir {tmp_path} --cell 5"
    )


def test_array_indices_are_ranges():
    assert [indices(n) for n in ([3], [0, 1], [2, 1, 0, 9], [1, 3, 5])] == [
        "3",
        "0-1",
        "0-2,9",
        "1,3,5",
    ]


def test_commands_share_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(runner, "gpus", lambda: ["4", "7"])
    found = [runner.environment(slot, 3) for slot in range(3)]
    assert [(one["OMP_NUM_THREADS"], one["CUDA_VISIBLE_DEVICES"]) for one in found] == [
        ("2", "4"), ("2", "7"), ("2", "4")
    ]  # fmt: skip


def test_completed_evaluations_are_skipped_and_the_others_run(monkeypatch):
    done = []
    file = SimpleNamespace(
        evaluated=lambda one, *_: one.name == "a",
        mark_evaluated=lambda *_: None,
        save=lambda *_: None,
    )
    monkeypatch.setattr(runner, "trained", lambda plan: "checkpoint")
    monkeypatch.setattr(runner, "CellRecord", lambda *_: file)
    one = SimpleNamespace(
        folder=None,
        options=SimpleNamespace(no_training=False, evaluate_again=False),
        progress=SimpleNamespace(set=lambda *_, **__: None),
        texts=SimpleNamespace(arguments=lambda *_: []),
        _commands=SimpleNamespace(stopping=threading.Event()),
        _command=lambda plan, phase, name, *_: done.append(name),
    )
    evaluations = [SimpleNamespace(name=name, arguments=()) for name in "abc"]
    runner.StudyRunner._cell(one, SimpleNamespace(run="run", evaluations=evaluations), 0)  # type: ignore[arg-type]
    assert done == ["b", "c"]


def test_the_remaining_training_time_follows_from_tokens_per_second(tmp_path):
    settings = SimpleNamespace(steps=100, trained_tokens=1000, tokens_after=lambda step: 10 * step)
    plan = SimpleNamespace(run=tmp_path, settings=settings)
    assert _training(plan) == ("0/100", "", "", "")  # type: ignore[arg-type]
    lines = [{"kind": "train", "step": n, "loss": 3.5, "tokens_per_second": 40.0} for n in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert _training(plan) == ("20/100", "3.5000", "40", "20 s")  # type: ignore[arg-type]


def test_a_corpus_that_cannot_be_prepared_is_reported_with_its_cell(monkeypatch):
    def of_run(self, plan):
        raise DataError("no such folder")

    monkeypatch.setattr(StudyTexts, "of_run", of_run)
    plans = [SimpleNamespace(cell=GridCell(0, {}, []), evaluations=[])]
    with pytest.raises(StudyError, match="no such folder"):
        StudyTexts(None).check(plans)  # type: ignore[arg-type]
