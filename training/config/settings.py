"""Every setting of a training run, and the root class that holds all settings of a run.

Fields marked `may_change` do not shape the weights beyond rounding: they may differ when a run is resumed
and do not count in its identity.
"""

from itertools import groupby
from typing import Literal

from pydantic import Field, model_validator

from data.sampling.segments import Segment, SegmentPlan
from data.settings import DataSettings
from errors import StrictSettings
from model.settings import ModelSettings
from training.config.optimizer_settings import (
    AdamWSettings,
    CosineSchedule,
    EmaSettings,
    OptimizerSettings,
    ScheduleSettings,
    WsdSchedule,
)
from training.config.stage_settings import StageSettings, segments
from training.config.trainer_settings import (
    CheckpointSettings,
    NonFiniteSettings,
    ParallelSettings,
    ProfileSettings,
    SampleSettings,
    SpikeSettings,
    StopOnNonFinite,
    ValidationSettings,
    WandbSettings,
    free,
    optional,
    setting,
)


class TrainingSettings(StrictSettings):
    """Optimization, validation and logging."""

    tokens: int = setting(2_000_000, "budget: target tokens of the whole run, e.g. 200M", ge=1)
    batch_size: int = setting(32, "sequences per optimizer step, over all devices", ge=1)
    micro_batch_size: int | None = free(
        None,
        "sequences of train_length per device and forward pass; null: all of a step. Shorter stages use "
        "as many tokens",
        ge=1,
    )
    optimizer: OptimizerSettings = setting(AdamWSettings(), "optimizer of the weights")
    lr_schedule: ScheduleSettings = setting(
        CosineSchedule(), "learning rate as a function of the step"
    )
    stages: list[StageSettings] = optional(
        "stages of the run, in order: window length, batch size, overrides of the positional scheme; "
        "empty: one stage",
        default=[],
    )
    grad_clip: float | None = setting(
        1.0, "maximum norm of the whole gradient; null: no clipping", gt=0
    )
    on_nonfinite: NonFiniteSettings = free(
        StopOnNonFinite(), "what to do if the loss or gradient of a step is not finite"
    )
    on_spike: SpikeSettings | None = optional("skip steps with a loss spike; null: apply them")
    z_loss: float | None = optional(
        "coefficient of (ln Z)² in the gradients, 1e-4 in PaLM (arXiv:2204.02311); reported losses exclude "
        "it; null: none",
        gt=0,
    )
    ema: EmaSettings | None = optional(
        "a mean of the weights, for validation, samples, evaluate.py and generate.py; null: none"
    )
    precision: Literal["auto", "float32", "bfloat16", "float64"] = setting(
        "auto", "auto: bfloat16 autocast on a GPU that has it, float32 elsewhere"
    )
    compile: bool | None = free(
        None,
        "torch.compile: a minute at the start, faster steps after it; null: on GPUs, not on CPUs",
    )
    parallel: ParallelSettings = free(ParallelSettings(), "how processes share the run")
    rank_timeout: float = free(
        1800.0,
        "seconds without progress after which a process counts as lost and all others exit; longer than "
        "the slowest step, compiling included",
        gt=0,
    )
    num_threads: int | None = free(None, "CPU threads; null: as torch decides", ge=1)
    log_interval: int = free(
        10, "steps between lines on the terminal, and between rates in metrics.jsonl", ge=1
    )
    checkpoint: CheckpointSettings = setting(
        CheckpointSettings(), "when to save checkpoints, and which to keep"
    )
    validation: ValidationSettings = setting(ValidationSettings(), "held-out loss during training")
    samples: SampleSettings = setting(SampleSettings(), "text generated during training")
    wandb: WandbSettings = setting(WandbSettings(), "logging to Weights & Biases")
    tensorboard: bool = free(False, "write the metrics as TensorBoard files to the run directory")
    profile: ProfileSettings | None = free(None, "trace some steps with torch.profiler; null: none")

    @model_validator(mode="after")
    def _intervals_and_sizes_agree(self) -> "TrainingSettings":
        c = self.checkpoint
        v = self.validation
        if c.best is not None and c.best not in v.multiples:
            raise ValueError(
                f"checkpoint.best = {c.best} is not measured: add it to validation.multiples"
            )
        if c.best is not None and c.interval and (not v.interval or c.interval % v.interval):
            fix = f"make it a multiple of validation.interval ({v.interval})"
            raise ValueError(
                f"checkpoint.best requires a validation at each checkpoint, every {c.interval} steps: "
                f"{fix if v.interval else 'set validation.interval'}"
            )
        if (size := self.micro_batch_size) is not None and size > self.batch_size:
            raise ValueError(f"micro_batch_size {size} is larger than batch_size {self.batch_size}")
        return self


class ParentSettings(StrictSettings):
    """The checkpoint that an extension run or fork starts from, and whose settings are the defaults."""

    run: str = Field(
        description="run directory whose weights are the initial weights",
        json_schema_extra={"may_change": True},
    )
    checkpoint: int | None = free(None, "step of its checkpoint; null: the newest", ge=0)
    hash: str | None = setting(
        None, "of that checkpoint; recorded at the start, and checked if set"
    )
    fork: Literal[True] | None = optional(
        "true: continue its optimizer, step count and data order too, as --fork RUN does"
    )


class RunSettings(StrictSettings):
    """All settings of one run."""

    train_length: int = setting(256, "tokens of a training window, L0", ge=2)
    original_length: int | None = setting(
        None, "length that stretches are measured from; null: train_length", ge=2
    )
    seed: int = setting(0, "decides initial weights, order of the data, samples", ge=0, lt=1 << 63)
    parent: ParentSettings | None = optional("the run that an extension run starts from")
    model: ModelSettings = setting(
        ModelSettings(),  # pyright: ignore[reportCallIssue]
        "the decoder and its positional scheme",
    )
    data: DataSettings = setting(
        DataSettings(),  # pyright: ignore[reportCallIssue]
        "text, tokenizer and batches",
    )
    training: TrainingSettings = setting(TrainingSettings(), "optimization, validation and logging")

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Window length, batch size and steps of every stage."""
        t = self.training
        return segments(t.stages, t.tokens, self.train_length, t.batch_size)

    @property
    def plan(self) -> tuple[Segment, ...]:
        """The segments that determine the order of the data: those of the stages, with neighbors of equal
        length and batch size as one."""
        return tuple(
            Segment(*size, sum(segment.steps for segment in group))
            for size, group in groupby(self.segments, key=lambda segment: segment[:2])
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(segment.steps for segment in self.segments)

    @property
    def is_fork(self) -> bool:
        """Whether the run continues its parent's optimizer, step count and data order."""
        return self.parent is not None and bool(self.parent.fork)

    @property
    def first_step(self) -> int:
        """The number of updates before the run's own first one: in a fork, those of its parent; else 0."""
        return self.parent.checkpoint or 0 if self.parent is not None and self.is_fork else 0

    def tokens_after(self, step: int) -> int:
        """Target tokens of the first `step` updates."""
        shares = SegmentPlan(self.plan).shares(0, step)
        return sum(share.length * (share.stop - share.first) for share in shares)

    @property
    def trained_tokens(self) -> int:
        """Target tokens of the whole run."""
        return self.tokens_after(self.steps)

    @model_validator(mode="after")
    def _lengths_and_budget_agree(self) -> "RunSettings":
        t = self.training
        length = self.train_length
        targets = self.training.validation.targets
        if self.steps < 1:
            raise ValueError(
                f"training.tokens = {t.tokens} is less than one step: training.batch_size × train_length = "
                f"{t.batch_size * length} tokens"
            )
        if targets > length:
            raise ValueError(
                f"training.validation.targets = {targets} exceeds train_length = {length}"
            )
        self.data.positions.check(length)
        decay = t.lr_schedule.decay if isinstance(t.lr_schedule, WsdSchedule) else 0.0
        warmup = t.lr_schedule.warmup / (1 if t.lr_schedule.warmup < 1 else self.steps)
        share = warmup + decay / (1 if decay <= 1 else self.steps)
        if share > 1:
            keys = "warmup or decay" if decay else "warmup"
            raise ValueError(
                f"training.lr_schedule: warmup and decay take {share:.0%} of the run's {self.steps} steps; "
                f"lower {keys}, or raise training.tokens"
            )
        return self
