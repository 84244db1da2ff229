"""Checkpoints of a model and an optimizer that are not a run's."""

from dataclasses import replace
from pathlib import Path

from run_directory.checkpoints import Checkpoint, save_snapshot
from run_directory.process_group import ALONE
from run_directory.training_settings import StopOnNonFinite
from training.optim.step_guard import StepGuard
from training.train_state import TrainState


def state_of(model, optimizer, step: int = 0, average=None) -> TrainState:
    guard = StepGuard(StopOnNonFinite(), None, "cpu")
    return TrainState(model, optimizer, guard, average, forward=model, step=step)


def save_checkpoint(
    folder: Path, step: int, model, optimizer, state=None, average=None, group=ALONE
) -> Checkpoint:
    snapshot = state_of(model, optimizer, step, average).capture()
    return save_snapshot(folder, replace(snapshot, state=state or {}), group)


def restore(model, optimizer, checkpoint: Checkpoint, average=None) -> dict:
    state_of(model, optimizer, average=average).restore(checkpoint)
    return checkpoint.state
