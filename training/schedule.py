"""Learning rates, stage and micro-batch size of every step: a function of the settings and the
step."""

from run_directory.run_settings import RunSettings
from run_directory.stages import Stage, stage_of, stages_of
from training.train_state import TrainState


class TrainingSchedule:
    """The stage and the learning rates of every step of a run."""

    def __init__(self, settings: RunSettings):
        t = settings.training
        self.stages = stages_of(settings)
        self.steps = settings.steps
        self._lr_schedule = t.lr_schedule
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
        return stage_of(self.stages, step)

    def learning_rates(self, step: int, stage: Stage | None = None) -> dict[str, float]:
        """Every learning rate at update `step`, by its name in metrics.jsonl."""
        stage = stage or self.stage(step)
        rise = min(1.0, (step - stage.start + 1) / stage.warmup) if stage.warmup else 1.0
        return {
            name: self._lr_schedule.rate(peak, step, self.steps) * rise
            for name, peak in self._peaks.items()
        }

    def micro_batch_size(self, stage: Stage) -> int:
        """Sequences per device and forward pass: as many tokens as training.micro_batch_size
        sequences of train_length have; by default the whole batch."""
        tokens = self._micro_batch_tokens
        return max(1, tokens // stage.length) if tokens else stage.batch_size
