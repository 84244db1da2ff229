"""Stages of a run: from which step on its positional schemes run under which settings.

A pure function of the step, so that a resumed run finds its stage by itself. `training.changes` makes the
stages; what may change is what a trained checkpoint may be evaluated under, for the weights go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model import ModelError, ModelSettings
from training.errors import TrainingError
from training.overrides import override
from training.schedule import learning_rate, steps_of
from training.settings import RunSettings, TrainingSettings


@dataclass(frozen=True)
class Stage:
    """What holds for update `start` (0, 1, ...) and those after it, up to the next stage."""

    start: int
    model: ModelSettings
    words: tuple[str, ...] = ()  # what changed
    warmup: int = 0  # updates in which the learning rate rises again

    def rise(self, step: int) -> float:
        """Share of the schedule's learning rate at update `step`: (step − start + 1) / warmup, at most 1."""
        return min(1.0, (step - self.start + 1) / self.warmup) if self.warmup else 1.0

    def describe(self) -> str:
        rise = f"; the learning rate rises again over {self.warmup} steps" if self.warmup else ""
        return f"after step {self.start} positions change: {', '.join(self.words)}{rise}"


def stages_of(settings: RunSettings) -> list[Stage]:
    """The stages of a run in order; the first is the run as its model is set.

    Raises:
        TrainingError: a change outside the run or out of order, one that changes nothing, or one that the
            weights do not allow, named by its place in `training.changes`.
    """
    stages, current, steps = [Stage(0, settings.model)], settings, settings.steps
    for i, change in enumerate(settings.training.changes):
        where, start, before = f"training.changes.{i}", steps_of(change.at, steps), stages[-1].start
        if not before < start < steps:
            earlier = f"come after the change before it, at step {before}, and " if before else ""
            raise TrainingError(
                f"{where}.at = {change.at:g} is step {start}: it must {earlier}lie between 1 and "
                f"{steps - 1}, for the run has {steps} steps"
            )
        asked = _changed(current, change.words, f"{where}.words")
        stages.append(Stage(start, asked.model, tuple(change.words), steps_of(change.warmup, steps)))
        current = asked
    for i, stage in enumerate(stages[1:]):
        end = stages[i + 2].start if i + 2 < len(stages) else steps
        if stage.start + stage.warmup > end:
            raise TrainingError(
                f"training.changes.{i}.warmup takes {stage.warmup} steps, but its stage has "
                f"{end - stage.start}: lower it"
            )
    return stages


def _changed(current: RunSettings, words: Sequence[str], where: str) -> RunSettings:
    """The settings with a change's words laid over those before it."""
    try:
        asked = override(current, words)
    except (ModelError, TrainingError) as error:
        raise TrainingError(f"{where}: {error}") from error
    if asked.model == current.model:
        raise TrainingError(f"{where}: {', '.join(words)} changes nothing; remove the change")
    return asked


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of update `step`."""
    return [stage for stage in stages if stage.start <= step][-1]


def stage_after(stages: Sequence[Stage], done: int) -> Stage:
    """The stage that weights after `done` updates were last trained in: that of a checkpoint."""
    return stage_of(stages, max(done - 1, 0))


def last_trained(settings: RunSettings, done: int) -> tuple[RunSettings, str]:
    """The settings that weights after `done` updates were last trained under, and one sentence about the
    changes on the way to them, '' if there were none."""
    stages = stages_of(settings)
    last = stage_after(stages, done)
    passed = [f"after step {s.start}: {', '.join(s.words)}" for s in stages[1:] if s.start <= last.start]
    sentence = f"positions as last trained, changed {'; '.join(passed)}" if passed else ""
    return settings.model_copy(update={"model": last.model}), sentence


def learning_rates(training: TrainingSettings, stage: Stage, step: int, steps: int) -> dict[str, float]:
    """Every learning rate at update `step` of a run of `steps`, by its name in metrics.jsonl."""
    return {
        name: learning_rate(training.schedule, peak, step, steps) * stage.rise(step)
        for name, peak in training.optimizer.rates.items()
    }
