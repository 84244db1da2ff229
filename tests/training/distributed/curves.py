"""Short trainings without a run directory, in one process or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate.state import AcceleratorState, GradientState

from data import PreparedData
from model import Transformer
from run_directory.exposure import make_sampler
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests import processes
from train import train_step
from training.batches import StepBatch, micro_batches
from training.checks import make_model
from training.distributed.parallel import Parallel
from training.stop_requests import StopRequests
from training.train_state import TrainState

CLIP = 0.5  # below the norms of these trainings, so that every step is clipped


class Training:
    """A run's model, optimizer and data; its learning rates stay at their peak."""

    def __init__(
        self, overrides: Sequence[str], prepared: PreparedData, prepare: Callable | None = None
    ):
        self.settings = load_settings(RunSettings, [*overrides, f"training.grad_clip={CLIP}"])
        t = self.settings.training
        self.parallel = Parallel(t)
        self.model: Transformer = make_model(
            self.settings, prepared.tokenizer.vocab_size
        ).initialize(5)
        self.model.to(torch.float64 if t.precision == "float64" else torch.float32).train()
        if prepare is not None:
            prepare(self.model)
        self.state = TrainState.create(self.model, self.settings, self.parallel)
        self._sampler = make_sampler(self.settings, prepared)

    def steps(self, start: int, stop: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the updates start, ..., stop − 1."""
        return [self.step(number) for number in range(start, stop)]

    def step(self, number: int) -> tuple[float, float]:
        t = self.settings.training
        length = self.settings.train_length
        batch = self._sampler.batch(number, self.parallel.data_rank, self.parallel.data_world)
        parts = micro_batches(
            batch, t.micro_batch_size, length, self.parallel.device, self.parallel.shard
        )
        step = StepBatch(parts, batch.n_targets, {})
        metrics = train_step(self.state, step, self.parallel, t, StopRequests()).read()
        return metrics.loss, metrics.grad_norm


def afresh(work: Callable):
    """What `work()` gives in a process that has shared nothing yet, or has parted."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    found = work()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def shared(world: int, work: Callable, seconds: float = 240) -> list:
    """What `work()` gives each of `world` processes; fails where it fails on one, or not all have
    ended."""
    answers = processes.together(world, lambda: afresh(work), seconds)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
