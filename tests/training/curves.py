"""Short trainings without a run directory, in one process or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch._dynamo
from accelerate.state import AcceleratorState, GradientState

from data import PreparedData
from run_directory.checkpoints import save_checkpoint
from run_directory.position_overrides import make_model
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import TrainingSchedule
from settings.load import load_settings
from tests import processes
from train import train_step
from training.micro_batches import StepBatch, make_sampler, micro_batches
from training.parallel import Parallel, autocast_type
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
        self.parallel.autocast_dtype = autocast_type(t.precision)
        self.model = make_model(self.settings, prepared.tokenizer.vocab_size).initialize(5)
        self.model.to(torch.float64 if t.precision == "float64" else torch.float32).train()
        if prepare is not None:
            prepare(self.model)
        self.state = TrainState.create(self.model, self.settings, self.parallel)
        self._schedule = TrainingSchedule(self.settings)
        self._sampler = make_sampler(self.settings, prepared)

    def steps(self, start: int, stop: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the updates start, ..., stop − 1."""
        return [self.step(number) for number in range(start, stop)]

    def step(self, number: int) -> tuple[float, float]:
        parallel = self.parallel
        stage = self._schedule.stage(number)
        batch = self._sampler.batch(number, parallel.data_rank, parallel.data_world)
        size = stage.micro_batch_size
        parts = [part.to(parallel) for part in micro_batches(batch, size, stage.length)]
        step = StepBatch(stage, parts, batch.n_targets)
        t = self.settings.training
        metrics = train_step(self.state, step, parallel, t, StopRequests()).read()
        return metrics["loss"], metrics["grad_norm"]

    def save(self, folder) -> None:
        """As training.checkpointer does. Every process calls it."""
        carried = self.state.carried_rows(self.parallel)
        save_checkpoint(folder, self.state.step, self.state.capture(carried), group=self.parallel)
        self.parallel.wait()


def afresh(work: Callable):
    """What `work()` gives in a process that has shared and compiled nothing yet, or has parted."""
    torch._dynamo.reset()  # the number of graphs of one function is limited

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    try:
        return work()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        forget()  # other tests of this process have no group


def shared(world: int, work: Callable, seconds: float = 240) -> list:
    """What `work()` gives each of `world` processes; fails where it fails on one, or not all have
    ended."""
    answers = processes.together(world, lambda: afresh(work), seconds)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
