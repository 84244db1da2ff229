"""The schedule of a run: its stages (window length, batch size, position settings) and learning rates.

Stages come from `training.stages` and `training.changes`, and are a pure function of the step, so resuming
needs no state. Position settings may change as a trained checkpoint allows at test time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from data.sampling.segments import Segment
from model import ModelError, ModelSettings
from training.config.settings import RunSettings, TrainingSettings
from training.config.test_time import override
from training.errors import TrainingError
from training.optim.lr_schedule import learning_rate, steps_of


@dataclass(frozen=True)
class Stage:
    """Settings of the updates from `start` (0, 1, ...) to the next stage."""

    start: int
    model: ModelSettings
    length: int  # tokens of a window
    batch_size: int  # windows of a step, all ranks
    words: tuple[str, ...] = ()  # overrides of the positional scheme
    warmup: int = 0  # updates in which the learning rate rises again
    is_resized: bool = False  # length or batch size differ from the stage before

    def rise(self, step: int) -> float:
        """Share of the schedule's learning rate at update `step`: (step − start + 1) / warmup, at most 1."""
        return min(1.0, (step - self.start + 1) / self.warmup) if self.warmup else 1.0

    def describe(self) -> str:
        parts = [f"windows of {self.length} tokens, {self.batch_size} a step"] if self.is_resized else []
        parts += [f"positions change: {', '.join(self.words)}"] if self.words else []
        rise = [f"the learning rate warms up over {self.warmup} steps"] if self.warmup else []
        return f"after step {self.start} {'; '.join(parts + rise)}"


@dataclass(frozen=True)
class _Edge:
    """The start of a stage, and the setting that defines it."""

    start: int
    where: str
    words: Sequence[str]
    warmup: int
    portion: Segment | None = None  # None: as before


def stages_of(settings: RunSettings) -> list[Stage]:
    """The stages of a run in order; the first has the model as set.

    Raises:
        TrainingError: a change outside the run or out of order, one that changes nothing, or one that the
            weights do not allow; names its index in `training.changes` or `training.stages`.
    """
    first, current, steps = settings.plan[0], settings, settings.steps
    stages = [Stage(0, settings.model, first.length, first.batch_size)]
    for edge in sorted(_edges(settings), key=lambda edge: edge.start):
        before, size = stages[-1], edge.portion or Segment(stages[-1].length, stages[-1].batch_size)
        if edge.words:
            current = _changed(current, edge.words, f"{edge.where}.words")
        resized = (size.length, size.batch_size) != (before.length, before.batch_size)
        made = Stage(
            edge.start, current.model, size.length, size.batch_size, tuple(edge.words), edge.warmup, resized
        )
        if before.start == edge.start:  # a change at the start of a stage
            words, warmup = before.words + made.words, max(before.warmup, made.warmup)
            stages[-1] = replace(made, words=words, warmup=warmup, is_resized=before.is_resized or resized)
        elif resized or edge.words or edge.warmup:
            stages.append(made)
    for stage, end in zip(stages, [*(s.start for s in stages[1:]), steps], strict=True):
        if stage.start + stage.warmup > end:
            (where, *_) = (
                e.where for e in _edges(settings) if (e.start, e.warmup) == (stage.start, stage.warmup)
            )
            raise TrainingError(
                f"{where}.warmup takes {stage.warmup} steps, but its stage has {end - stage.start}: lower it"
            )
    return stages


def _edges(settings: RunSettings) -> list[_Edge]:
    """The starts of `training.stages`, without the first, then those of `training.changes`."""
    t, plan, steps = settings.training, settings.plan, settings.steps
    if t.stages and (t.stages[0].words or t.stages[0].warmup):
        raise TrainingError(
            "training.stages.0 cannot have words or warmup: set model.position and training.schedule"
        )
    edges, before = [], 0
    for i, start in enumerate(accumulate(portion.steps for portion in plan[:-1])):
        stage, where = t.stages[i + 1], f"training.stages.{i + 1}"
        edges.append(_Edge(start, where, stage.words, steps_of(stage.warmup, steps), plan[i + 1]))
    for i, change in enumerate(t.changes):
        where, start = f"training.changes.{i}", steps_of(change.at, steps)
        if not before < start < steps:
            earlier = f"come after the change before it, at step {before}, and " if before else ""
            raise TrainingError(
                f"{where}.at = {change.at:g} is step {start}: it must {earlier}be between 1 and "
                f"{steps - 1}, as the run has {steps} steps"
            )
        edges.append(_Edge(start, where, change.words, steps_of(change.warmup, steps)))
        before = start
    return edges


def _changed(current: RunSettings, words: Sequence[str], where: str) -> RunSettings:
    """The settings with the overrides of a change."""
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
    """The stage of the last of `done` updates: that of a checkpoint."""
    return stage_of(stages, max(done - 1, 0))


def last_trained(settings: RunSettings, done: int) -> tuple[RunSettings, str]:
    """The settings of the last of `done` updates, and a line about the changes up to it, '' if there were
    none."""
    stages = stages_of(settings)
    last = stage_after(stages, done)
    passed = [
        f"after step {s.start}: {', '.join(s.words)}" for s in stages if s.words and s.start <= last.start
    ]
    sentence = f"positions as last trained, changed {'; '.join(passed)}" if passed else ""
    return settings.model_copy(update={"model": last.model}), sentence


def learning_rates(training: TrainingSettings, stage: Stage, step: int, steps: int) -> dict[str, float]:
    """Every learning rate at update `step` of a run of `steps`, by its name in metrics.jsonl."""
    return {
        name: learning_rate(training.schedule, peak, step, steps) * stage.rise(step)
        for name, peak in training.optimizer.rates.items()
    }


class TrainingSchedule:
    """The stage and the learning rates of every step of a run."""

    def __init__(self, settings: RunSettings):
        self.settings, self.stages = settings, stages_of(settings)

    def stage(self, step: int) -> Stage:
        """The stage of update `step`."""
        return stage_of(self.stages, step)

    def learning_rates(self, step: int) -> dict[str, float]:
        """Every learning rate at update `step`, by its name in metrics.jsonl."""
        return learning_rates(self.settings.training, self.stage(step), step, self.settings.steps)

    def micro_batch_size(self, step: int) -> int | None:
        """Sequences per device and forward pass: as many tokens as training.micro_batch_size sequences of
        train_length have. None: the whole batch."""
        size, longest = self.settings.training.micro_batch_size, self.settings.train_length
        return None if size is None else max(1, size * longest // self.stage(step).length)
