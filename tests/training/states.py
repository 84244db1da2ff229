"""Checkpoints of a model and an optimizer that are not a run's."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from run_directory.checkpoints import Checkpoint, save_snapshot
from run_directory.process_group import ALONE
from run_directory.run_settings import RunSettings
from training.checkpointer import Checkpointer
from training.stop_requests import StopRequests
from training.train_state import TrainState


def state_of(model, optimizer, step: int = 0, average=None) -> TrainState:
    # not a StepGuard: its state cannot be read where tensors have no data
    guard = SimpleNamespace(state=lambda: {}, load=lambda state: None)
    return TrainState(model, optimizer, guard, average, forward=model, step=step)  # type: ignore


def save_checkpoint(
    folder: Path, step: int, model, optimizer, state=None, average=None, group=ALONE
) -> Checkpoint:
    snapshot = state_of(model, optimizer, step, average).capture()
    return save_snapshot(folder, replace(snapshot, state=state or {}), group)


def restore(model, optimizer, checkpoint: Checkpoint, average=None) -> dict:
    state_of(model, optimizer, average=average).restore(checkpoint)
    return checkpoint.state


def checkpointer(folder: Path, requests: StopRequests | None = None, **checkpoint) -> Checkpointer:
    """One that writes the checkpoints of a run of train_length 24 and nothing else."""
    settings = RunSettings.model_validate(
        {
            "train_length": 24,
            "training": {"checkpoint": checkpoint, "validation": {"targets": 8}},
        }
    )
    parallel = SimpleNamespace(saving_group=ALONE)
    run = SimpleNamespace(
        folder=folder,
        settings=settings,
        parallel=parallel,
        sampler=None,
        steps=100,
        requests=requests or StopRequests(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.checkpointer.make_ledger", lambda *_: None)
        return Checkpointer(run)  # pyright: ignore[reportArgumentType]
