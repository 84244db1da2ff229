"""Which checkpoints are kept, and asynchronous saves: equal bytes, errors raised, no file lost."""

import errno
import os
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from errors import INTERRUPTED, TrainingError
from run_directory import checkpoints as module
from run_directory.checkpoints import find_checkpoint, folder_of, steps_of
from run_directory.training_settings import CheckpointSettings
from tests.training.checkpoint.deaths import trained, update
from tests.training.states import checkpointer, save_checkpoint, state_of
from training.retention import DIVERGED, best_of, held_out_state, prune
from training.stop_requests import StopRequests


def write(saver, step, pair, **state):
    """Save a model and optimizer as `step`, with this state beside theirs."""
    saver._save(state_of(*pair, step), state, wait=False)


def test_best_checkpoint_uses_configured_length(tmp_path):
    losses = [
        {24: 3.0, 48: 5.0},
        {24: 2.5, 48: 4.0},
        {24: 2.0, 48: 4.5},
        {},
        {24: 1.0, 48: float("nan")},
    ]
    with checkpointer(tmp_path, keep=1, best=2, interval=None) as saver:
        for step, nll in enumerate(losses, 1):
            write(saver, step, trained(0), held_out=held_out_state(nll))
    assert steps_of(tmp_path) == [2, 5] and best_of(tmp_path, 48) == (2, 4.0)
    (folder_of(tmp_path, 2) / "state.json").write_text("{")
    assert best_of(tmp_path, 48) is None
    prune(tmp_path, 5, CheckpointSettings(keep=1, best=2), 24)
    assert steps_of(tmp_path) == [5]


@pytest.mark.parametrize(
    ("checkpoint", "saved", "kept_steps"),
    [
        # resumed from 20: 30 was damaged
        ({"keep": 2}, [(10, {}), (20, {}), (30, {}), (25, {})], [20, 25]),
        # a step that a resumed run superseded is not the best one
        (
            {"keep": 2, "best": 1, "interval": None},
            [
                (step, {"held_out": held_out_state({24: nll})})
                for step, nll in ((10, 2.0), (30, 1.0), (12, 3.0), (14, 4.0))
            ],
            [10, 12, 14],
        ),
        ({"keep": 1}, [(1, {}), (2, {}), (3, {DIVERGED: True}), (4, {DIVERGED: True})], [2, 4]),
        ({"keep": 1}, [(1, {}), (2, {DIVERGED: True}), (3, {})], [3]),
    ],
)
def test_which_checkpoints_stay(tmp_path, checkpoint, saved, kept_steps):
    for step, state in saved:
        with checkpointer(tmp_path, **checkpoint) as saver:
            write(saver, step, trained(1), **state)
    assert steps_of(tmp_path) == kept_steps
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(kept_steps)


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
    with checkpointer(tmp_path / "once") as saver:
        write(saver, 2, pair, tokens=5)
    monkeypatch.setattr(module, "save_file", late)
    requests = StopRequests()
    with checkpointer(tmp_path / "beside", requests, asynchronous=True) as saver:
        write(saver, 2, pair, tokens=5)
        update(*pair)
        assert requests.status == 0
        assert steps_of(tmp_path / "beside") == []
        gate.set()
        write(saver, 3, pair, tokens=6)  # one at a time: the first is there now
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
        tensors = state_of(net, optimizer).capture(copied=copied).tensors
    assert all(own.device.type == "cpu" for kind in tensors.values() for own in kind.values())
    assert copies.bytes == times * 2 * (3 + 1) * 5 * 4  # weights and moments, in float32


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("raised_by", ["wait", "save", "leaving"])
def test_async_save_errors_are_raised(tmp_path, monkeypatch, raised_by):
    pair = trained(1)
    save_checkpoint(tmp_path, 1, *pair)
    good = content(tmp_path, 1)
    monkeypatch.setattr(module, "save_file", full)
    requests = StopRequests()
    saver = checkpointer(tmp_path, requests, asynchronous=True)
    with (
        pytest.raises(TrainingError, match=r"disk full .* while saving step 2; step 1 is intact"),
        saver,
    ):
        write(saver, 2, pair)
        while requests.status == 0:
            time.sleep(0.001)
        assert requests.status == INTERRUPTED
        if raised_by == "wait":
            saver.wait()
        if raised_by == "save":
            write(saver, 3, pair)
    assert steps_of(tmp_path) == [1] and content(tmp_path, 1) == good


class Other:
    """A group of two, whose other process failed at what this one did."""

    rank = 0
    world = 2

    def __init__(self, overrides: str):
        self._words = overrides

    def gather(self, value):
        return [value, self._words]


def test_training_error_waits_for_pending_save(tmp_path):
    with pytest.raises(KeyError), checkpointer(tmp_path, asynchronous=True) as saver:
        write(saver, 4, trained(1))
        raise KeyError
    assert find_checkpoint(tmp_path).step == 4
