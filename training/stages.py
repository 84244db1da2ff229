"""Stages of a run: from which step on it sees windows of which length, and its positional schemes run under
which settings.

A pure function of the step, so that a resumed run finds its stage by itself. `training.stages` and
`training.changes` make the stages; what may change is what a trained checkpoint may be evaluated under, for
the weights go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from data.windows import Portion
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
    length: int  # tokens of a window
    batch_size: int  # windows of a step, all ranks
    words: tuple[str, ...] = ()  # what changed in the positional scheme
    warmup: int = 0  # updates in which the learning rate rises again
    is_resized: bool = False  # length or batch size differ from the stage before

    def rise(self, step: int) -> float:
        """Share of the schedule's learning rate at update `step`: (step − start + 1) / warmup, at most 1."""
        return min(1.0, (step - self.start + 1) / self.warmup) if self.warmup else 1.0

    def describe(self) -> str:
        told = [f"windows of {self.length} tokens, {self.batch_size} a step"] if self.is_resized else []
        told += [f"positions change: {', '.join(self.words)}"] if self.words else []
        rise = [f"the learning rate rises again over {self.warmup} steps"] if self.warmup else []
        return f"after step {self.start} {'; '.join(told + rise)}"


@dataclass(frozen=True)
class _Edge:
    """Where something changes, and the setting that says so."""

    start: int
    where: str
    words: Sequence[str]
    warmup: int
    portion: Portion | None = None  # None: as before


def stages_of(settings: RunSettings) -> list[Stage]:
    """The stages of a run in order; the first is the run as its model is set.

    Raises:
        TrainingError: a change outside the run or out of order, one that changes nothing, or one that the
            weights do not allow, named by its place in `training.changes` or `training.stages`.
    """
    first, current, steps = settings.plan[0], settings, settings.steps
    stages = [Stage(0, settings.model, first.length, first.batch_size)]
    for edge in sorted(_edges(settings), key=lambda edge: edge.start):
        before, size = stages[-1], edge.portion or Portion(stages[-1].length, stages[-1].batch_size)
        if edge.words:
            current = _changed(current, edge.words, f"{edge.where}.words")
        resized = (size.length, size.batch_size) != (before.length, before.batch_size)
        made = Stage(
            edge.start, current.model, size.length, size.batch_size, tuple(edge.words), edge.warmup, resized
        )
        if before.start == edge.start:  # a change at the edge of two stages
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
    """Where stages of `training.stages` begin, all but the first, and then what `training.changes` says."""
    t, plan, steps = settings.training, settings.plan, settings.steps
    if t.stages and (t.stages[0].words or t.stages[0].warmup):
        raise TrainingError(
            "training.stages.0 has no stage before it: model.position and training.schedule say how it begins"
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
                f"{where}.at = {change.at:g} is step {start}: it must {earlier}lie between 1 and "
                f"{steps - 1}, for the run has {steps} steps"
            )
        edges.append(_Edge(start, where, change.words, steps_of(change.warmup, steps)))
        before = start
    return edges


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
