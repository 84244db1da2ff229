"""Which checkpoints are kept, and asynchronous saves: equal bytes, errors raised, no file lost."""

import errno
import os
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from errors import INTERRUPTED, TrainingError, is_disk_full
from run_directory.training_settings import CheckpointSettings
from tests.training.checkpoint.deaths import trained, update
from training.checkpoint import storage as module
from training.checkpoint.checkpointer import CheckpointWriter
from training.checkpoint.retention import DIVERGED, best_of, held_out_state, kept, prune
from training.checkpoint.snapshot import capture
from training.checkpoint.storage import find_checkpoint, folder_of, save_checkpoint, steps_of
from training.distributed.error_barrier import on_all


def test_keeps_latest_milestone_and_best_checkpoints():
    steps = [5, 10, 15, 20, 25, 30]
    assert kept(steps, CheckpointSettings(keep=2), None) == {25, 30}
    assert kept(steps, CheckpointSettings(interval=5, keep=1, keep_interval=10), None) == {
        10,
        20,
        30,
    }
    assert kept(steps, CheckpointSettings(keep=1, best=2), 15) == {15, 30}
    assert kept(steps, CheckpointSettings(keep=9), None) == set(steps)
    assert kept(steps, CheckpointSettings(keep=1, best=2), 7) == {30}


def test_best_checkpoint_uses_configured_length(tmp_path):
    settings = CheckpointSettings(keep=1, best=2)
    losses = [
        {24: 3.0, 48: 5.0},
        {24: 2.5, 48: 4.0},
        {24: 2.0, 48: 4.5},
        {},
        {24: 1.0, 48: float("nan")},
    ]
    with CheckpointWriter(tmp_path, settings, 24) as saver:
        for step, nll in enumerate(losses, 1):
            saver.write(step, *trained(0), {"held_out": held_out_state(nll)})
    assert steps_of(tmp_path) == [2, 5] and best_of(tmp_path, 48) == (2, 4.0)
    (folder_of(tmp_path, 2) / "state.json").write_text("{")
    assert best_of(tmp_path, 48) is None
    prune(tmp_path, 5, settings, 24)
    assert steps_of(tmp_path) == [5]


def test_keeps_only_latest_and_removes_superseded(tmp_path):
    pair = trained(1)
    settings = CheckpointSettings(keep=2)
    for step in (10, 20, 30, 25):  # resumed from 20: 30 was damaged
        with CheckpointWriter(tmp_path, settings, 24) as saver:
            saver.write(step, *pair, {})
        assert steps_of(tmp_path) == {10: [10], 20: [10, 20], 30: [20, 30], 25: [20, 25]}[step]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000020", "step-00000025",
    ]  # fmt: skip


def test_superseded_checkpoints_are_not_best(tmp_path):
    pair = trained(0)
    settings = CheckpointSettings(keep=2, best=1)
    for step, nll in ((10, 2.0), (30, 1.0), (12, 3.0), (14, 4.0)):
        with CheckpointWriter(tmp_path, settings, 24) as saver:
            saver.write(step, *pair, {"held_out": held_out_state({24: nll})})
    assert steps_of(tmp_path) == [10, 12, 14]


def content(run, step: int) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder_of(run, step).iterdir()}


def test_async_save_equals_sync_save(tmp_path, monkeypatch):
    """The thread is held back until the weights, moments and generator have moved on."""
    gate = threading.Event()
    real = module.save_file

    def late(*args):
        assert gate.wait(30)
        real(*args)

    pair = trained(2)
    save_checkpoint(tmp_path / "once", 2, *pair, {"tokens": 5})
    monkeypatch.setattr(module, "save_file", late)
    with CheckpointWriter(tmp_path / "beside", CheckpointSettings(asynchronous=True), 24) as saver:
        saver.write(2, *pair, {"tokens": 5})
        update(*pair)
        assert saver.status == 0
        assert steps_of(tmp_path / "beside") == []
        gate.set()
        saver.write(3, *pair, {"tokens": 6})  # one at a time: the first is there now
        assert 2 in steps_of(tmp_path / "beside")
    assert steps_of(tmp_path / "beside") == [2, 3]  # leaving waits
    assert content(tmp_path / "beside", 2) == content(tmp_path / "once", 2)
    assert find_checkpoint(tmp_path / "beside").step == 3


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied, to the host or on it."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.bytes += found.nbytes
        return found


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("device", "copied", "times"), [("cpu", False, 0), ("cpu", True, 1), ("cuda", True, 1)]
)
def test_snapshot_copies_each_tensor_once(device, copied, times):
    with FakeTensorMode(), Copies() as copies:  # of a GPU, nothing is needed but its name
        net = torch.nn.Module()
        net.register_parameter("weight", torch.nn.Parameter(torch.empty(5, 3, device=device)))
        net.register_parameter("bias", torch.nn.Parameter(torch.empty(5, device=device)))
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        for weight in net.parameters():
            optimizer.state[weight]["momentum_buffer"] = torch.empty_like(weight)
        copies.bytes = 0
        image = capture(net, optimizer, copied=copied)
    assert all(
        own.device.type == "cpu" for own in [*image.weights.values(), *image.optimizer.values()]
    )
    assert copies.bytes == times * 2 * (3 + 1) * 5 * 4  # weights and moments, in float32


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("raised_by", ["status", "wait", "save", "leaving"])
def test_async_save_errors_are_raised(tmp_path, monkeypatch, raised_by):
    pair = trained(1)
    save_checkpoint(tmp_path, 1, *pair)
    good = content(tmp_path, 1)
    monkeypatch.setattr(module, "save_file", full)
    saver = CheckpointWriter(tmp_path, CheckpointSettings(asynchronous=True), 24)
    with (
        pytest.raises(TrainingError, match=r"disk full .* while saving step 2; step 1 is intact"),
        saver,
    ):
        saver.write(2, *pair, {})
        if raised_by == "status":
            while saver.status == 0:
                time.sleep(0.001)
            assert saver.status == INTERRUPTED
        if raised_by in ("status", "wait"):
            saver.wait()
        if raised_by == "save":
            saver.write(3, *pair, {})
    assert steps_of(tmp_path) == [1] and content(tmp_path, 1) == good


class Other:
    """A group of two, whose other process failed at what this one did."""

    rank = 0
    world = 2

    def __init__(self, overrides: str):
        self._words = overrides

    def gather(self, value):
        return [value, self._words]


def test_save_error_on_one_rank_raises_on_all_ranks():
    with pytest.raises(TrainingError, match=r"process 1 could not save: no such luck"):
        on_all(Other("no such luck"), "save", lambda: 3)
    with pytest.raises(TrainingError) as caught:
        on_all(Other(str(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))), "save", lambda: 3)
    assert is_disk_full(caught.value)
    with pytest.raises(ZeroDivisionError):  # not before the other has heard of it
        on_all(Other("no such luck"), "save", lambda: 1 // 0)


def test_training_error_waits_for_pending_save(tmp_path):
    with (
        pytest.raises(KeyError),
        CheckpointWriter(tmp_path, CheckpointSettings(asynchronous=True), 24) as saver,
    ):
        saver.write(4, *trained(1), {})
        raise KeyError
    assert find_checkpoint(tmp_path).step == 4


def test_keeps_latest_checkpoint_before_divergence(tmp_path):
    with CheckpointWriter(tmp_path, CheckpointSettings(keep=1), 24) as saver:
        for step, state in enumerate([{}, {}, {DIVERGED: True}, {DIVERGED: True}], 1):
            saver.write(step, *trained(0), state)
        assert steps_of(tmp_path) == [2, 4]
        saver.write(5, *trained(0), {})
    assert steps_of(tmp_path) == [5]
