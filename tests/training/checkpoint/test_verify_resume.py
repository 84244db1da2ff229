"""scripts/checks/verify_resume.py accepts exact resumes and names planted differences."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import train
from data.files import sha256_of
from data.sampling.exposure import read_exposure
from errors import TrainingError
from run_directory.checkpoints import _digest, find_checkpoint, folder_of
from run_directory.console import Console
from run_directory.exposure import exposure_of
from run_directory.metrics_file import read_metrics
from scripts.checks import verify_resume
from scripts.checks.verify_resume import (
    Attempt,
    differences,
    edges_of,
    first_difference,
    kill_steps,
    report,
)


def called(monkeypatch, script, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, argv)])
    return script.main()


@pytest.mark.slow
def test_killed_runs_equal_uninterrupted_run(overrides, tmp_path, monkeypatch, capsys):
    """Spikes are skipped on the way: their statistics are resumed too."""
    policy = ["training.on_spike={sigmas: 0.5, window: 3, limit: 1000}", "data.max_bytes=9000"]
    options = ["--steps", "60", "--kills", "2", "--out", tmp_path / "out"]
    status = called(monkeypatch, verify_resume, *overrides, *policy, *options)
    output = capsys.readouterr()
    assert status == 0, output
    assert "EQUAL: all 60 steps, weights and optimizer, to the bit, after 2 kills" in output.out
    assert "SIGKILL" in output.out and "attempt 3: from step" in output.err
    whole = tmp_path / "out" / "reference"
    killed = tmp_path / "out" / "killed"
    lines = read_metrics(killed / "metrics.jsonl", "train")
    assert len(edges_of(lines)) >= 1 and sum("skipped" in line for line in lines) >= 2
    resumed = read_exposure(killed)
    same = read_exposure(whole)
    assert resumed.positions.tolist() == same.positions.tolist() == [60 * 8] * 24
    assert resumed.distances.tolist() == same.distances.tolist()
    (whole / "exposure.npz").unlink()  # as of a run from before there were ledgers
    assert exposure_of(whole).distances.tolist() == same.distances.tolist()
    assert exposure_of(whole, 40).positions.tolist() == [40 * 8] * 24


@pytest.mark.slow
def test_data_and_losses_are_independent_of_world_size(overrides, tmp_path, monkeypatch, capsys):
    overrides = [*overrides, "data.packing=intra_document"]
    assert (
        called(
            monkeypatch, verify_resume, *overrides, "--steps", "24", "--kills", "2", "--ranks", 1, 2
        )
        == 0
    )
    assert (
        "EQUAL: all 24 steps, to 1e-10 (data to the bit), after 2 kills" in capsys.readouterr().out
    )


def test_difference_is_reported_with_its_step(overrides, tmp_path, monkeypatch):
    """A moment of the checkpoint of step 6 is moved: the update after it differs, and the loss of step 8."""
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    overrides = [*overrides, "training.checkpoint.keep=9", "training.validation.interval=null"]
    assert called(monkeypatch, train, *overrides, "--run-dir", whole) == 0
    shutil.copytree(whole, cut)
    for step in (9, 12):
        shutil.rmtree(folder_of(cut, step))
    assert differences(whole, whole, 0.0) == []
    plant(find_checkpoint(cut).folder)
    assert find_checkpoint(cut).step == 6  # only the later steps show that it was altered
    assert called(monkeypatch, train, *overrides, "--run-dir", cut) == 0
    step, tensor = differences(whole, cut, 0.0)
    assert step.startswith("step 8, train: grad_norm is ") and "attempt 2 of the killed run" in step
    assert tensor.startswith("at the end, embed.weight of model.safetensors differs by up to ")
    assert differences(whole, cut, 1.0) == []


def plant(folder: Path) -> None:
    file = folder / "optimizer.safetensors"
    tensors = load_file(file)
    tensors["exp_avg/embed.weight"] += 1e-3
    save_file(tensors, file)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file.name] = {"sha256": sha256_of(file), "bytes": file.stat().st_size}
    manifest["hash"] = _digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def line(step: int, **values: object) -> dict:
    return {
        "step": step,
        "kind": "train",
        "attempt": 1,
        "loss": 2.5,
        "data": "ab",
        "mfu": 0.1,
    } | values


def test_first_difference_of_metrics():
    one = [line(1), line(2), line(2, kind="validation", nll={"24": 1.0})]
    assert first_difference(one, [*one[:2], one[2] | {"attempt": 4, "mfu": 0.7}], 0.0) is None
    for other, message in (
        ([line(1), line(2, data="cd", loss=9.0), one[2]], "step 2, train: the data is ab in .* cd in att"),
        ([line(1, loss=2.5 + 1e-12), *one[1:]], "step 1, train: loss is 2.5 in the reference"),
        ([*one[:2], one[2] | {"nll": {"24": 1.1}}], "step 2, validation: nll"),
        (one[:2], "step 2: only the reference run logs a validation"),
        ([one[0], line(2, skipped="spike"), one[2]], "step 2, train: skipped is None in .* spike in"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(first_difference(one, other, 0.0))
    close = [line(1, loss=2.5 + 1e-12), *one[1:]]
    assert first_difference(one, close, 1e-10) is None
    assert first_difference(one, [line(1, loss="nan"), *one[1:]], 1e-10) is not None


def test_kill_between_stage_boundary_and_next_checkpoint():
    for seed in range(50):
        moments = kill_steps(60, 3, [27, 52], 5, random.Random(seed))
        assert moments == sorted(moments) and len(moments) == 3
        assert any(52 <= moment < 55 for moment in moments) and all(
            1 <= moment < 60 for moment in moments
        )
    assert len({tuple(kill_steps(60, 3, [], 5, random.Random(seed))) for seed in range(20)}) > 15


def test_kill_includes_processes_in_other_sessions(tmp_path):
    """As a launcher gives them to its workers, which would train on without it."""
    note = tmp_path / "worker"
    worker = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    command = f"[sys.executable, '-c', {worker!r}]"
    launcher = f"import subprocess, sys; subprocess.run({command}, start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", launcher], start_new_session=True)
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)
    pid = int(note.read_text())
    verify_resume.kill(process)
    end = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):  # once its new parent has heard of it
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("attempts", "kills"),
    [
        ([(0, 5, True), (4, 9, True), (8, 12, False)], 2),
        ([(0, 5, True), (4, 12, True), (12, 12, False)], 1),  # killed when all was done
        ([(0, 5, True), (4, 12, True), (12, 12, True), (12, 12, False)], 1),
        ([(0, 5, True), (4, 4, True), (4, 12, False)], 1),  # one died before it trained
        ([(0, 5, True), (4, 12, False)], 1),
    ],
)
def test_kill_requires_later_steps(attempts, kills, capsys):
    found = [Attempt(1, *one) for one in attempts]
    assert report(found, [3], 12, [], (1, 1), Console()) == (0 if kills == 2 else 1)
    output = capsys.readouterr().out
    assert (f"after {kills} kills" if kills == 2 else f"only {kills} kills were followed") in output


def test_inconclusive_settings_are_rejected(overrides, tmp_path, monkeypatch):
    for options, message in (
        (["--kills", "1"], "must be at least 2"),
        (["--steps", "4"], "4 steps are too few for 3 kills, which take 3 each; set --steps 9$"),
        (["--steps", "7"], "7 steps are too few .* set --steps 9, or --kills 2$"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--ranks", "0", "1"], "--ranks must be at least 1, not 0"),
        (["runs/none"], "runs/none: no such run directory; .*pass a run, YAML files or overrides"),
    ):
        with pytest.raises(TrainingError, match=message):
            called(monkeypatch, verify_resume, *overrides, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
