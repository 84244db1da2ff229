"""Learning rate as a pure function of the step: nothing to save, nothing to resume."""

import math

from training.errors import TrainingError
from training.optimizer_settings import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ScheduleSettings,
    WsdSchedule,
)


def steps_of(share_or_steps: float, steps: int) -> int:
    """Below 1 a share of the run's steps, rounded; else the number given."""
    return round(share_or_steps * steps) if share_or_steps < 1 else int(share_or_steps)


def warmup_steps(schedule: ScheduleSettings, steps: int) -> int:
    """Steps of the rise."""
    return steps_of(schedule.warmup, steps)


def decay_steps(schedule: WsdSchedule, steps: int) -> int:
    """Steps of the fall at the end, at least one; a decay of 1 is the whole run."""
    return max(1, steps if schedule.decay == 1 else steps_of(schedule.decay, steps))


def learning_rate(schedule: ScheduleSettings, peak: float, step: int, steps: int) -> float:
    """Learning rate of update `step` (0 .. steps − 1) of a run of `steps` updates.

    Warm-up over w updates is peak · (step + 1) / w, so the first update moves and the w-th has the peak.
    After it a decay over n updates falls from the peak, at its first update, towards final · peak, which it
    would reach one update past the end: no update is wasted on a rate of zero.

    With the warm-up given in steps, the rates up to the decay do not depend on the length of the run: runs of
    several lengths can go on from one stem.
    """
    if not 0 <= step < steps:
        raise TrainingError(f"step {step} is outside the run's {steps} steps")
    warmup = warmup_steps(schedule, steps)
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
    return peak * (schedule.final + (1 - schedule.final) * share)
