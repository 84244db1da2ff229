"""Short trainings without a run folder, alone or as one of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate.state import AcceleratorState, GradientState

from data import Prepared
from model import Transformer
from tests import processes
from training.average import Average
from training.config import load_settings
from training.exposure import make_batches
from training.gate import Gate
from training.loop import Stepper, micro_batches
from training.optimizer import make_optimizer
from training.parallel import Parallel
from training.settings import RunSettings
from training.start import autocast_type, make_model

CLIP = 0.5  # below the norms of these trainings, so that every step is clipped


class Training:
    """A run's model, optimizer and data; its learning rates stay at their peak."""

    def __init__(self, words: Sequence[str], prepared: Prepared, prepare: Callable | None = None):
        self.settings = load_settings(RunSettings, [*words, f"training.clip={CLIP}"])
        t = self.settings.training
        self.parallel = Parallel(t)
        autocast = autocast_type(t.precision, self.parallel.device)
        self.model: Transformer = make_model(self.settings, prepared.tokenizer.vocab_size).initialise(5)
        self.model.to(torch.float64 if t.precision == "float64" else torch.float32).train()
        if prepare is not None:
            prepare(self.model)
        wrapped = self.parallel.wrap(self.model, autocast=autocast)
        self.optimizer = make_optimizer(self.model, t.optimizer)
        gate = Gate(t.on_nonfinite, t.on_spike, self.parallel.device)
        self.average = Average(self.model, t.ema, self.settings.steps) if t.ema else None
        more = {"gate": gate, "average": self.average}
        self._step = Stepper(self.parallel, wrapped, self.optimizer, clip=t.clip, autocast=autocast, **more)
        self._batches = make_batches(self.settings, prepared)

    def steps(self, start: int, stop: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the updates start, ..., stop − 1."""
        return [self.step(number) for number in range(start, stop)]

    def step(self, number: int) -> tuple[float, float]:
        t, length = self.settings.training, self.settings.train_length
        batch = self._batches.batch(number, self.parallel.rank, self.parallel.world)
        parts = micro_batches(batch, t.micro_batch, length, self.parallel.device)
        found = self._step(parts, batch.n_targets).read()
        return found.loss, found.grad_norm


def afresh(work: Callable):
    """What `work()` gives in a process that has shared nothing yet, or has parted."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    found = work()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def shared(world: int, work: Callable, seconds: float = 240) -> list:
    """What `work()` gives each of `world` processes; fails where it fails on one, or not all have ended."""
    answers = processes.together(world, lambda: afresh(work), seconds)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
