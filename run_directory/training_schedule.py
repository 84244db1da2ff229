"""The stages of a run: window length, batch size, positional scheme and learning rates at every
step.

Stages are a pure function of the settings, so resuming needs no state. The positional scheme may
change as a trained checkpoint allows at test time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from errors import TrainingError
from model import ModelError, ModelSettings
from run_directory.position_overrides import meta_model, override
from run_directory.run_settings import RunSettings
from run_directory.training_settings import StageSettings, as_steps


@dataclass(frozen=True)
class Stage:
    """Settings of the updates from `start` (0, 1, ...) to the next stage."""

    start: int
    model: ModelSettings
    length: int  # tokens of a window
    batch_size: int  # windows of a step, all ranks
    micro_batch_size: int = field(compare=False)  # windows per device and forward pass
    overrides: tuple[str, ...] = ()  # overrides of the positional scheme that this stage adds
    warmup: int = 0  # updates in which the learning rate rises again
    is_resized: bool = False  # length or batch size differ from the stage before

    @property
    def changes(self) -> str:
        """What the stage changes."""
        parts = []
        if self.is_resized:
            parts.append(f"windows of {self.length} tokens, {self.batch_size} a step")
        if self.overrides:
            parts.append(f"positions change: {', '.join(self.overrides)}")
        if self.warmup:
            parts.append(f"the learning rate warms up over {self.warmup} steps")
        return "; ".join(parts)


def stages_of(settings: RunSettings) -> list[Stage]:
    """The stages of a run in order, without stages that change nothing; the first one has the model
    of the settings.

    Raises TrainingError, which names the index in `training.stages`, for a warmup longer than its
    stage, and for overrides that change nothing or that the weights do not allow.
    """
    current = settings
    stages = []
    start = 0
    entries = settings.training.stages or [StageSettings()]
    # number of tokens in training.micro_batch_size windows of train_length
    micro_batch_tokens = (settings.training.micro_batch_size or 0) * settings.train_length
    for i, (stage, size) in enumerate(zip(entries, settings.step_ranges, strict=True)):
        where = f"training.stages.{i}"
        warmup = as_steps(stage.warmup, settings.steps)
        if not stages and (stage.overrides or warmup):
            raise TrainingError(
                f"{where}: set model.position and training.lr_schedule.warmup instead"
            )
        if warmup > size.steps:
            raise TrainingError(
                f"{where}.warmup = {warmup} steps is longer than the {size.steps} steps of the "
                "stage"
            )
        if stage.overrides:
            try:
                changed = override(current, stage.overrides)
            except (ModelError, TrainingError) as error:
                raise TrainingError(f"{where}.overrides: {error}") from error
            if changed.model == current.model:
                text = ", ".join(stage.overrides)
                raise TrainingError(f"{where}.overrides: {text} changes nothing; remove it")
            current = changed
        resized = bool(stages) and size[:2] != (stages[-1].length, stages[-1].batch_size)
        if not stages or resized or stage.overrides or warmup:
            stages.append(
                Stage(
                    start=start,
                    model=current.model,
                    length=size.length,
                    batch_size=size.batch_size,
                    micro_batch_size=max(1, micro_batch_tokens // size.length)
                    if micro_batch_tokens
                    else size.batch_size,
                    overrides=tuple(stage.overrides),
                    warmup=warmup,
                    is_resized=resized,
                )
            )
        start += size.steps
    return stages


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """The stage of the last update before a checkpoint of `step`; the first stage if there is
    none."""
    return [stage for stage in stages if stage.start < max(step, 1)][-1]


def last_trained(settings: RunSettings, step: int) -> tuple[RunSettings, str]:
    """The settings of the last update before a checkpoint of `step`, and a line with the overrides
    up to it; '' if there are none."""
    stages = stages_of(settings)
    last = stage_of(stages, step)
    passed = [
        f"after step {s.start}: {', '.join(s.overrides)}"
        for s in stages
        if s.overrides and s.start <= last.start
    ]
    line = f"positions as last trained, changed {'; '.join(passed)}" if passed else ""
    return settings.model_copy(update={"model": last.model}), line


def flops_of(settings: RunSettings, vocab_size: int, first_step: int = 0) -> float:
    """Training FLOPs of a run from `first_step` on, summed over its stages."""
    stages = stages_of(settings)
    ends = [*(stage.start for stage in stages[1:]), settings.steps]
    total = 0.0
    for stage, end in zip(stages, ends, strict=True):
        model = meta_model(settings.model_copy(update={"model": stage.model}), vocab_size)
        begin = min(end, max(stage.start, first_step))
        tokens = settings.tokens_after(end) - settings.tokens_after(begin)
        total += tokens * float(model.flops_per_token(stage.length))
    return total


class TrainingSchedule:
    """The stage and the learning rates of every step of a run."""

    def __init__(self, settings: RunSettings):
        t = settings.training
        self.stages = stages_of(settings)
        self.steps = settings.steps
        self._lr_schedule = t.lr_schedule
        self._peaks = t.optimizer.rates

    def stage(self, step: int) -> Stage:
        """The stage of the update after `step` others."""
        return stage_of(self.stages, step + 1)

    def learning_rates(self, step: int) -> dict[str, float]:
        """Every learning rate of the update after `step` others, by its name in metrics.jsonl."""
        stage = self.stage(step)
        rise = min(1.0, (step - stage.start + 1) / stage.warmup) if stage.warmup else 1.0
        return {
            name: self._lr_schedule.rate_at(peak, step, self.steps) * rise
            for name, peak in self._peaks.items()
        }
