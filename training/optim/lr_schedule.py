"""Learning rate as a pure function of the step; it has no state to save."""

import math

from errors import TrainingError
from run_directory.optimizer_settings import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ScheduleSettings,
    WsdSchedule,
)


def steps_of(share_or_steps: float, steps: int) -> int:
    """Convert a setting to steps: below 1 it is a share of the run's steps, which is rounded."""
    return round(share_or_steps * steps) if share_or_steps < 1 else int(share_or_steps)


def decay_steps(schedule: WsdSchedule, steps: int) -> int:
    """The number of decay steps at the end, at least one; a decay of 1 is the whole run."""
    return max(1, steps if schedule.decay == 1 else steps_of(schedule.decay, steps))


def learning_rate(schedule: ScheduleSettings, peak: float, step: int, steps: int) -> float:
    """Learning rate of update `step` (0 .. steps − 1) of a run of `steps` updates.

    The warm-up over w updates is peak · (step + 1) / w: the first update has a positive rate, and the w-th
    has the peak. A decay over n updates then falls from the peak, at its first update, towards min_lr_ratio ·
    peak, which it would reach one update after the last: no update has a rate of zero.

    With a warm-up in steps, the rates before the decay do not depend on the length of the run, so runs of
    several lengths can share their first steps.
    """
    if not 0 <= step < steps:
        raise TrainingError(f"step {step} is outside the run's {steps} steps")
    warmup = steps_of(schedule.warmup, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    match schedule:
        case ConstantSchedule():
            return peak
        case CosineSchedule():
            share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        case LinearSchedule():
            share = 1 - (step - warmup) / (steps - warmup)
        case WsdSchedule():
            share = min(1.0, (steps - step) / decay_steps(schedule, steps))
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share)
