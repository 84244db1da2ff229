"""Learning rates, stage and micro-batch size of every step: a function of the settings and the
step."""

import math

from run_directory.optimizer_settings import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ScheduleSettings,
    WsdSchedule,
    as_steps,
)
from run_directory.run_settings import RunSettings
from run_directory.stages import Stage, stages_of
from training.train_state import TrainState


class TrainingSchedule:
    """The stage and the learning rates of every step of a run."""

    def __init__(self, settings: RunSettings):
        t = settings.training
        self.stages = stages_of(settings)
        self.steps = settings.steps
        self._lr_schedule = in_steps(t.lr_schedule, settings.steps)
        self._peaks = t.optimizer.rates
        self._micro_batch_tokens = (t.micro_batch_size or 0) * settings.train_length

    def apply(self, state: TrainState, stage: Stage) -> dict[str, float]:
        """Set the learning rates of the next update and, where a stage begins with it, its
        positional scheme; returns the rates by their names in metrics.jsonl."""
        if stage.start == state.step > 0:
            state.begin_stage(stage.model)
        rates = self.learning_rates(state.step, stage)
        state.optimizer.set_learning_rates(rates)
        return rates

    def stage(self, step: int) -> Stage:
        """The stage of update `step` (0, 1, ...)."""
        return next(stage for stage in reversed(self.stages) if stage.start <= step)

    def learning_rates(self, step: int, stage: Stage | None = None) -> dict[str, float]:
        """Every learning rate at update `step`, by its name in metrics.jsonl."""
        stage = stage or self.stage(step)
        rise = min(1.0, (step - stage.start + 1) / stage.warmup) if stage.warmup else 1.0
        return {
            name: learning_rate(self._lr_schedule, peak, step, self.steps) * rise
            for name, peak in self._peaks.items()
        }

    def micro_batch_size(self, stage: Stage) -> int:
        """Sequences per device and forward pass: as many tokens as training.micro_batch_size
        sequences of train_length have; by default the whole batch."""
        tokens = self._micro_batch_tokens
        return max(1, tokens // stage.length) if tokens else stage.batch_size


def in_steps(schedule: ScheduleSettings, steps: int) -> ScheduleSettings:
    """The schedule with its warm-up and decay as numbers of steps, not as shares of the run."""
    changes = {"warmup": as_steps(schedule.warmup, steps)}
    if isinstance(schedule, WsdSchedule):
        # at least one step; a decay of 1 is the whole run
        decay = steps if schedule.decay == 1 else as_steps(schedule.decay, steps)
        changes["decay"] = max(1, decay)
    return schedule.model_copy(update=changes)


def learning_rate(schedule: ScheduleSettings, peak: float, step: int, steps: int) -> float:
    """Learning rate of update `step` (0 .. steps − 1) of a run of `steps` updates, under a schedule
    of `in_steps`.

    The warm-up over w updates is peak · (step + 1) / w: the first update has a positive rate, and
    the w-th has the peak. A decay over n updates then falls from the peak, at its first update,
    towards min_lr_ratio · peak, which it would reach one update after the last: no update has a
    rate of zero.

    With a warm-up in steps, the rates before the decay do not depend on the length of the run, so
    runs of several lengths can share their first steps.
    """
    warmup = schedule.warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    match schedule:
        case ConstantSchedule():
            return peak
        case CosineSchedule():
            share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        case LinearSchedule():
            share = 1 - (step - warmup) / (steps - warmup)
        case WsdSchedule(decay=decay):
            share = min(1.0, (steps - step) / decay)
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share)
