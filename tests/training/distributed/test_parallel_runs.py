"""train.py on several processes: two nodes, a sharded run exported to one file, and rejected
launches."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from errors import TrainingError
from run_directory import checkpoints as saved
from run_directory.metrics_file import MetricsFile
from run_directory.run import Run
from run_directory.weights import weights_of
from tests.processes import free_port
from tests.training.conftest import ROOT, environment
from tests.training.distributed.curves import afresh, shared
from tests.training.test_train import here, lines
from training.train_state import TrainState


def differ(one, other, kinds=("train",)) -> float:
    """The largest difference of a loss between two runs, which must have seen the same data."""
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        assert (a["kind"], a["step"]) == (b["kind"], b["step"])
        if a["kind"] == "train":
            assert (a["data"], a["targets"]) == (b["data"], b["targets"])
            largest = max(largest, abs(a["loss"] - b["loss"]), abs(a["grad_norm"] - b["grad_norm"]))
        if a["kind"] == "validation":
            largest = max(
                largest, *(abs(a["nll"][length] - b["nll"][length]) for length in a["nll"])
            )
    return largest


@pytest.fixture
def exact(overrides):
    return [*overrides, "training.precision=float64", "data.packing=intra_document"]


@pytest.mark.slow
def test_two_nodes_match_single_process(exact, tmp_path, monkeypatch):
    """Two launchers with node ranks 0 and 1 on loopback, started by
    scripts/launch/multi_node.sh."""
    assert here(monkeypatch, *exact, "--run-dir", str(tmp_path / "one")) == 0
    port = str(free_port())
    folder = tmp_path / "two"
    nodes = [
        subprocess.Popen(
            [
                *(
                    "bash",
                    str(ROOT / "scripts/launch/multi_node.sh"),
                    "--node",
                    str(node),
                    "--nodes",
                    "2",
                ),
                *("--gpus", "1", "--host", "127.0.0.1", "--port", port),
                *("--", *exact, "training.micro_batch_size=3", "--run-dir", str(folder)),
            ],
            env=environment(ACCELERATE_USE_CPU="true", PYTHON=sys.executable),
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    message = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(message)
    assert differ(lines(tmp_path / "one"), lines(folder)) < 1e-9


def test_sharded_run_end_to_end(exact, tmp_path, monkeypatch, capsys):
    """Two processes shard it, one goes on with it whole, two again with their parts; one file in
    the end."""
    whole = tmp_path / "whole"
    folder = tmp_path / "sharded"
    exact = [*exact, "training.checkpoint={interval: 3, keep: 9, asynchronous: true}"]
    exact += ["training.ema={decay: 0.7, start: 2}"]
    assert here(monkeypatch, *exact, "--run-dir", str(whole)) == 0

    def by_two(*more):
        overrides = [
            *exact,
            "training.parallel={sharding: full, processes: 2, activation_checkpointing: true}",
        ]
        return shared(2, lambda: here(monkeypatch, *overrides, *more, "--run-dir", str(folder)))

    def cut(step: int):
        for checkpoint in (folder / "checkpoints").glob("step-*"):
            if int(checkpoint.name[5:]) > step:
                shutil.rmtree(checkpoint)

    assert by_two() == [0, 0]
    assert differ(lines(whole), lines(folder)) < 1e-9
    newest = folder / "checkpoints" / "step-00000012"
    assert (newest / "model-00002-of-00002.safetensors").is_file() and not (
        newest / "model.safetensors"
    ).exists()
    means, last = (same_weights(folder, whole, which) for which in (None, "last"))
    assert max((means[name] - last[name]).abs().max() for name in means) > 1e-3

    cut(3)
    assert here(monkeypatch, *exact, "--run-dir", str(folder)) == 0
    assert differ(lines(whole), lines(folder)) < 1e-9 and (newest / "model.safetensors").is_file()
    assert "training.parallel.sharding: full → auto" in capsys.readouterr().err
    cut(9)  # now a whole checkpoint, read in parts
    assert by_two() == [0, 0]
    assert differ(lines(whole), lines(folder)) < 1e-9

    same_weights(folder, whole, None)


def test_single_process_sharding_with_bfloat16_gathers(overrides, tmp_path, monkeypatch):
    """As on a single GPU: looks, text and checkpoints of blocks that are gathered in bfloat16."""
    whole = tmp_path / "whole"
    folder = tmp_path / "sharded"
    overrides = [*overrides, "training.precision=bfloat16"]
    assert here(monkeypatch, *overrides, "--run-dir", str(whole)) == 0
    overrides += ["training.parallel={sharding: full, processes: 1}", "--run-dir", str(folder)]
    assert shared(1, lambda: here(monkeypatch, *overrides)) == [0]
    assert differ(lines(whole), lines(folder), kinds=("train", "validation")) < 0.02
    assert [line["samples"] for line in lines(folder) if line["kind"] == "samples"]
    want = weights_of(Run.open(whole).load().model)
    found = weights_of(Run.open(folder).load().model)
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0.02, msg=name)


def same_weights(run, other, which) -> dict[str, torch.Tensor]:
    """The weights that both runs give to whom asks for these, compared."""
    found, want = (
        weights_of(Run.open(folder).load(weights=which).model) for folder in (run, other)
    )
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)
    return found


def refused(monkeypatch, *overrides) -> list[str]:
    """The error of each of two processes that may not train with these overrides."""

    def tell() -> str:
        with pytest.raises(TrainingError) as caught:
            here(monkeypatch, *overrides)
        return str(caught.value)

    return shared(2, tell)


def test_main_process_error_is_reported_on_all_ranks(exact, tmp_path, monkeypatch):
    """A run with other settings is refused by the process that holds its folder; the others do not
    wait."""
    folder = str(tmp_path / "run")
    assert here(monkeypatch, *exact, "training.checkpoint.interval=null", "--run-dir", folder) == 0
    main, other = refused(monkeypatch, *exact, "training.grad_clip=2.0", "--run-dir", folder)
    assert "training.grad_clip" in main and other == f"process 0 could not begin: {main}"


def test_sharded_save_failure_is_reported_on_all_ranks(overrides, tmp_path, monkeypatch):
    """Three runs one after the other in the same two processes; nobody waits for one that has
    failed."""
    overrides = [*overrides, "training.parallel.sharding=full", "training.validation.interval=null"]
    ports = {"metrics": free_port(), "copy": free_port(), "removal": free_port()}

    def metrics(rank, patch):
        def full(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if rank == 0:
            patch.setattr(MetricsFile, "sync", full)

    def copy(rank, patch):
        def memory(*_, **__):
            raise RuntimeError("out of memory")

        if rank == 1:
            patch.setattr(TrainState, "capture", memory)

    def removal(rank, patch):
        """Of a checkpoint that a resumed run has left behind."""
        rename = os.rename
        take = TrainState.capture

        def denied(old, new):
            if Path(new).name.startswith(".deleting-"):
                raise PermissionError(errno.EACCES, "Permission denied", str(old))
            rename(old, new)

        def leave_behind(*places, **more):
            (tmp_path / "removal" / "checkpoints" / "step-00000099").mkdir(
                parents=True, exist_ok=True
            )
            return take(*places, **more)

        if rank == 0:
            patch.setattr(os, "rename", denied)
            patch.setattr(TrainState, "capture", leave_behind)

    def tell() -> dict[str, str]:
        rank = int(os.environ["RANK"])
        message = {}

        def run(name: str) -> str:
            with pytest.raises((TrainingError, OSError, RuntimeError)) as caught:
                here(monkeypatch, *overrides, "--run-dir", str(tmp_path / name))
            return f"{type(caught.value).__name__}: {caught.value}"

        for name, breaks in {"metrics": metrics, "copy": copy, "removal": removal}.items():
            os.environ["MASTER_PORT"] = str(ports[name])
            with pytest.MonkeyPatch.context() as patch:
                breaks(rank, patch)
                message[name] = afresh(lambda name=name: run(name))
        return message

    zero, one = shared(2, tell, seconds=90)
    assert zero["metrics"] == "OSError: [Errno 28] No space left on device"
    assert (
        one["metrics"]
        == "TrainingError: process 0 could not save: [Errno 28] No space left on device"
    )
    assert zero["copy"] == "TrainingError: process 1 could not save: out of memory"
    assert one["copy"] == "RuntimeError: out of memory"
    assert zero["removal"].startswith("PermissionError: ") and "step-00000099" in zero["removal"]
    assert one["removal"] == "TrainingError: process 0 could not save" + zero["removal"][15:]
    # A removal that fails takes nothing away; what was saved before it is whole.
    assert saved.damage(tmp_path / "removal" / "checkpoints" / "step-00000003") is None
    assert not list(tmp_path.glob("[mc]*/checkpoints/*"))


def test_sharding_rejects_schedule_changes_of_learned_positions(overrides, tmp_path, monkeypatch):
    more = [
        "model.position={name: rope, temperature: {name: ssmax}}",
        'training.stages=[{duration: 6}, {overrides: ["model.position.scaling={name: drop}"]}]',
        "training.parallel.sharding=full",
    ]
    with pytest.raises(TrainingError, match=r"training.parallel.sharding.*none"):
        shared(
            2, lambda: here(monkeypatch, *overrides, *more, "--run-dir", str(tmp_path / "never"))
        )
    assert not (tmp_path / "never" / "checkpoints").exists()
