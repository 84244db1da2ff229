"""Settings of training: optimizer, learning rates, stages, checkpoints, parallelism, validation,
logging and step guards."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from data.sampling.window_order import StepRange
from settings.fields import StrictSettings, counts_if_changed, may_change, setting

# With validation.interval: auto
AUTO_INTERVAL = 250  # steps between validations
LEAST_VALIDATIONS = 5  # validations in a run


def share_or_steps(value: float) -> float:
    """Raise ValueError unless `value` is a share below 1 or a whole number of steps."""
    if value >= 1 and value != int(value):
        raise ValueError(f"{value:g} is neither a share (below 1) nor a whole number of steps")
    return value


ShareOrSteps = Annotated[float, AfterValidator(share_or_steps)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def as_steps(value: float, steps: int) -> int:
    """The number of steps of a setting: below 1 it is a share of the run's steps, which is
    rounded."""
    return round(value * steps) if value < 1 else int(value)


def steps_every(interval: int | None, steps: int) -> frozenset[int]:
    """Every `interval`-th step (None: none) of a run of `steps` steps, and its last step."""
    return frozenset({steps, *range(interval or steps, steps + 1, interval or steps)})


class AdamWBase(StrictSettings):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) for all weights that Muon does not
    update."""

    lr: float = setting(2e-3, "peak learning rate", gt=0)
    positions_lr: float | None = setting(
        None,
        "peak learning rate of parameters of the positional scheme, on the same schedule; null: lr",
        gt=0,
    )
    betas: tuple[Beta, Beta] = setting((0.9, 0.95), "decay of the two moments, each in [0, 1)")
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(
        0.1, "weight decay of matrices; embeddings, norms, biases and positions have none", ge=0
    )

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rates by their names in metrics.jsonl."""
        rates = {"lr": self.lr, "positions_lr": self.positions_lr}
        return {name: rate for name, rate in rates.items() if rate is not None}


class AdamWSettings(AdamWBase):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); weight decay on matrices only."""

    name: Literal["adamw"] = "adamw"


class MuonSettings(StrictSettings):
    """Muon for matrices (Jordan 2024, kellerjordan.github.io/posts/muon), AdamW for all other
    weights."""

    name: Literal["muon"] = "muon"
    lr: float = setting(2e-3, "peak learning rate of matrices", gt=0)
    momentum: float = setting(
        0.95,
        "decay of the running mean of gradients",
        ge=0,
        lt=1,
    )
    nesterov: bool = setting(True, "Nesterov momentum")
    weight_decay: float = setting(0.1, "weight decay of matrices", ge=0)
    iterations: int = setting(
        5, "Newton-Schulz steps, in bfloat16, towards an orthogonal update", ge=1, lt=100
    )
    adjust: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "size of an A × B update: 0.2·√max(A, B), so that learning rates are like AdamW's (Liu et "
        "al. 2025, arXiv:2502.16982), or √max(1, A / B), with learning rates around 0.02",
    )
    adamw: AdamWBase = setting(
        AdamWBase(), "AdamW of the head, embeddings, norms, biases and positions"
    )

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rates by their names in metrics.jsonl."""
        own = self.adamw.rates
        return {"lr": self.lr, "adamw_lr": own.pop("lr")} | own


OptimizerSettings = Annotated[AdamWSettings | MuonSettings, Field(discriminator="name")]


class EmaSettings(StrictSettings):
    """An exponential moving average of the weights, for evaluation."""

    decay: float = setting(
        0.999, "decay per step; the average spans about 1 / (1 − decay) steps", gt=0, lt=1
    )
    start: ShareOrSteps = setting(
        0.0,
        "when averaging starts; until then the average equals the weights. Below 1: a share of the "
        "run; from 1: a number of steps",
        ge=0,
    )


class LearningRateSchedule(StrictSettings):
    warmup: ShareOrSteps = setting(
        0.02,
        "length of the linear rise from 0. Below 1: a share of the run; from 1: a number of steps",
        ge=0,
    )

    def rate_at(self, peak: float, step: int, steps: int) -> float:
        """Learning rate of the update after `step` others (0 .. steps − 1) in a run of `steps`.

        The warm-up over w updates is peak · (step + 1) / w: the first update has a positive rate,
        and the w-th has the peak. A decay over n updates then falls from the peak, at its first
        update, towards min_lr_ratio · peak, which it would reach one update after the last: no
        update has a rate of zero.

        With a warm-up in steps, the rates before the decay do not depend on the length of the run,
        so runs of several lengths can share their first steps.
        """
        warmup = as_steps(self.warmup, steps)
        if step < warmup:
            return peak * (step + 1) / warmup
        least = getattr(self, "min_lr_ratio", 0.0)
        return peak * (least + (1 - least) * self.left(step, steps, warmup))

    def left(self, step: int, steps: int, warmup: int) -> float:
        """The share of the decay that is left after the warm-up, from 1 to 0."""
        return 1.0


_MIN_LR_RATIO = "learning rate at the end, as a share of the peak"


class CosineSchedule(LearningRateSchedule):
    """Half a cosine from the peak to `min_lr_ratio`."""

    name: Literal["cosine"] = "cosine"
    min_lr_ratio: float = setting(0.1, _MIN_LR_RATIO, ge=0, le=1)

    def left(self, step: int, steps: int, warmup: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


class LinearSchedule(LearningRateSchedule):
    """Linear decay from the peak to `min_lr_ratio`."""

    name: Literal["linear"] = "linear"
    min_lr_ratio: float = setting(0.0, _MIN_LR_RATIO, ge=0, le=1)

    def left(self, step: int, steps: int, warmup: int) -> float:
        return 1 - (step - warmup) / (steps - warmup)


class WsdSchedule(LearningRateSchedule):
    """Warmup, stable, decay: constant at the peak, then linear decay to `min_lr_ratio`
    (arXiv:2404.06395)."""

    name: Literal["wsd"] = "wsd"
    decay: Annotated[float, AfterValidator(lambda v: v if v == 1 else share_or_steps(v))] = setting(
        0.2,
        "length of the decay at the end. Up to 1: a share of the run; above 1: a number of steps",
        gt=0,
    )
    min_lr_ratio: float = setting(0.0, _MIN_LR_RATIO, ge=0, le=1)

    def left(self, step: int, steps: int, warmup: int) -> float:
        # at least one step; a decay of 1 is the whole run
        decay = steps if self.decay == 1 else max(1, as_steps(self.decay, steps))
        return min(1.0, (steps - step) / decay)


class ConstantSchedule(LearningRateSchedule):
    """Constant at the peak."""

    name: Literal["constant"] = "constant"


ScheduleSettings = Annotated[
    CosineSchedule | LinearSchedule | WsdSchedule | ConstantSchedule, Field(discriminator="name")
]


class StageSettings(StrictSettings):
    """A part of the run with one window length, batch size and positional scheme.

    The optimizer state and the learning-rate schedule continue from stage to stage. DroPE
    (arXiv:2512.12167), for example, removes the rotations in its last stage.
    """

    length: int | None = setting(
        None,
        "tokens of a window; the longest stage must have train_length; null: as in the previous "
        "stage, in the first stage train_length",
        ge=2,
    )
    batch_size: int | None = setting(
        None,
        "sequences per optimizer step; null: as in the previous stage if length is null, otherwise "
        "as many tokens as training.batch_size × train_length",
        ge=1,
    )
    duration: ShareOrSteps | None = setting(
        None,
        "length of the stage. Below 1: a share of training.tokens; from 1: a number of steps; "
        "null, in the last stage only: the rest of the budget",
        gt=0,
    )
    overrides: list[str] = setting(
        [], "overrides of model.position that a trained model supports; they add to earlier ones"
    )
    warmup: ShareOrSteps = setting(
        0.0,
        "length of the linear rise of the learning rate from 0 when the stage begins. Below 1: a "
        "share of the run; from 1: a number of steps",
        ge=0,
    )


def step_ranges_of(
    stages: Sequence[StageSettings], tokens: int, train_length: int, batch_size: int
) -> tuple[StepRange, ...]:
    """Window length, batch size and steps of every stage of a run with a budget of `tokens` tokens.

    Raises ValueError for stages that are inconsistent or do not fit the budget.
    """
    per_step = batch_size * train_length
    if not stages:
        return (StepRange(train_length, batch_size, tokens // per_step),)
    sizes = []
    spent = 0
    slack = 0
    for i, stage in enumerate(stages):
        where = f"training.stages.{i}"
        before = sizes[-1] if sizes else StepRange(train_length, batch_size)
        length = stage.length or before.length
        batch = stage.batch_size or (per_step // length if stage.length else before.batch_size)
        if stage.batch_size is None and stage.length and per_step % length:
            raise ValueError(
                f"{where}.batch_size is required: training.batch_size × train_length = {per_step} "
                f"tokens is not a multiple of its length {length}"
            )
        if stage.duration is None and i < len(stages) - 1:
            raise ValueError(f"{where}.duration is missing: only the last stage may have none")
        each = batch * length
        is_share = stage.duration is None or stage.duration < 1
        due = tokens - spent if stage.duration is None else stage.duration * tokens
        steps = int(due / each + 1e-6) if is_share else int(stage.duration or 0)
        if steps < 1:
            raise ValueError(f"{where} is shorter than one step of {batch} × {length} tokens")
        sizes.append(StepRange(length, batch, steps))
        spent = spent + steps * each
        slack = slack + each * is_share
    if (longest := max(step_range.length for step_range in sizes)) != train_length:
        raise ValueError(
            f"train_length = {train_length} must be the longest of training.stages, {longest}"
        )
    if spent > tokens or tokens - spent >= max(slack, per_step):
        raise ValueError(
            f"training.stages use {spent:,} tokens, but training.tokens = {tokens}: set it to "
            f"{spent}, or change the duration of a stage"
        )
    return tuple(sizes)


class CheckpointSettings(StrictSettings):
    """When to save checkpoints, and which to keep."""

    interval: int | None = may_change(
        500, "steps between checkpoints; null: only at the end and when interrupted", ge=1
    )
    keep: int = may_change(
        2,
        "number of newest checkpoints to keep; with 2, one is left if the newest is damaged",
        ge=1,
    )
    keep_interval: int | None = may_change(
        None, "keep all checkpoints whose step is a multiple of this", ge=1
    )

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> "CheckpointSettings":
        keep = self.keep_interval
        interval = self.interval
        if keep is not None and (interval is None or keep % interval):
            fix = f"make it a multiple of interval ({interval})" if interval else "set interval too"
            raise ValueError(f"keep_interval = {keep}: {fix}")
        return self


class ParallelSettings(StrictSettings):
    """How processes share the run. The launcher sets their number (configs/accelerate)."""

    processes: int | None = may_change(
        None,
        "required number of processes; null: any",
        ge=1,
    )
    sharding: Literal["auto", "none", "full"] = may_change(
        "auto",
        "none: every process has the whole model (DDP); full: weights, gradients and moments are "
        "sharded over all of them (FSDP2); auto: full if the accelerate config enables FSDP",
    )
    context: int = may_change(
        1,
        "processes that share each window (context parallelism); divides the number of processes; "
        "windows have at least 2 × context tokens",
        ge=1,
    )
    activation_checkpointing: bool | Literal["selective"] = may_change(
        False,
        "true: store only the input of each block and recompute the rest in the backward pass, "
        "which saves memory and takes more time; selective: store the outputs of matrix products "
        "and attention too, and recompute what is cheap",
    )

    @property
    def checkpointing(self) -> Literal["none", "selective", "full"]:
        """The activations of a block that are recomputed."""
        if self.activation_checkpointing == "selective":
            return "selective"
        return "full" if self.activation_checkpointing else "none"


class StopOnNonFinite(StrictSettings):
    """Stop before the update; the last checkpoint is unchanged."""

    limit: ClassVar[int] = 0  # steps that may be skipped

    name: Literal["stop"] = "stop"


class SkipNonFinite(StrictSettings):
    """Skip the update and continue; the data of the step are not used again."""

    name: Literal["skip"] = "skip"
    limit: int = may_change(
        10,
        "maximum number of skipped steps in a run; one more stops it",
        ge=1,
    )


NonFiniteSettings = Annotated[StopOnNonFinite | SkipNonFinite, Field(discriminator="name")]


class SpikeSettings(StrictSettings):
    """Skip the update of a step whose loss is far above the losses of earlier steps."""

    sigmas: float = setting(
        6.0, "a loss this many standard deviations above the mean is a spike", gt=0
    )
    window: int = setting(
        100,
        "number of applied steps over which mean and deviation are computed; no step is a spike "
        "before a stage of the run has this many",
        ge=2,
        le=100_000,
    )
    limit: int = may_change(
        10,
        "maximum number of skipped steps in a run; one more stops it",
        ge=1,
    )


class ValidationSettings(StrictSettings):
    """Held-out loss during training, on the same targets at every length."""

    interval: Annotated[int, Field(ge=1)] | Literal["auto"] | None = may_change(
        "auto",
        "steps between validations; auto: 250, and at least five validations in a run; null: only "
        "at the end and at the steps of `at`",
    )
    at: list[Annotated[ShareOrSteps, Field(gt=0)]] = may_change(
        [], "further validation steps. Below 1: a share of the run; from 1: a number of steps"
    )
    multiples: list[int] = may_change(
        [1, 2, 4],
        "lengths, as multiples of train_length",
        min_length=1,
    )
    spans: int = may_change(
        32, "number of spans of targets, from different places of the validation text", ge=1
    )
    targets: int = may_change(
        64,
        "targets in each span, at the end of its context",
        ge=1,
    )

    def steps(self, steps: int) -> frozenset[int]:
        """The validation steps of a run of `steps` steps. Raises ValueError if one of `at` is
        outside the run."""
        interval = AUTO_INTERVAL if self.interval == "auto" else self.interval
        chosen = set(steps_every(interval, steps))
        for share_or_step in self.at:
            step = max(1, as_steps(share_or_step, steps))
            if step > steps:
                raise ValueError(
                    f"training.validation.at has {share_or_step:g}, but the run has {steps} steps: "
                    "lower it"
                )
            chosen.add(step)
        if self.interval == "auto" and steps < LEAST_VALIDATIONS * AUTO_INTERVAL:
            chosen.update(i * steps // LEAST_VALIDATIONS for i in range(1, LEAST_VALIDATIONS))
        return frozenset(chosen - {0})

    @field_validator("multiples")
    @classmethod
    def _multiples_are_positive(cls, multiples: list[int]) -> list[int]:
        if min(multiples) < 1 or len(set(multiples)) < len(multiples):
            raise ValueError(
                f"multiples must be different whole numbers from 1 on, not {multiples}"
            )
        return multiples


class SampleSettings(StrictSettings):
    """Text generated greedily during training."""

    interval: int | None = may_change(
        None,
        "steps between samples; null: only at the end",
        ge=1,
    )
    prompts: list[str] | None = may_change(
        None, "one sample per prompt; null: the beginning of a held-out document"
    )
    tokens: int = may_change(64, "new tokens in each sample", ge=1)


class WandbSettings(StrictSettings):
    """Logging of metrics.jsonl to Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = may_change(
        "disabled", "online requires an account and a network"
    )
    project: str = may_change("sextant", "project of the run")
    entity: str | None = may_change(None, "account or team; null: your own")


class TrainingSettings(StrictSettings):
    """Optimization, validation and logging."""

    tokens: int = setting(
        2_000_000,
        "budget: target tokens of the whole run, e.g. 200M",
        ge=1,
    )
    batch_size: int = setting(
        32,
        "sequences per optimizer step, over all devices",
        ge=1,
    )
    micro_batch_size: int | None = may_change(
        None,
        "sequences of train_length per device and forward pass; null: all sequences of a step. "
        "Stages with shorter windows use as many tokens",
        ge=1,
    )
    optimizer: OptimizerSettings = setting(AdamWSettings(), "optimizer of the weights")
    lr_schedule: ScheduleSettings = setting(
        CosineSchedule(), "learning rate as a function of the step"
    )
    stages: list[StageSettings] = counts_if_changed(
        "stages of the run, in order: window length, batch size, overrides of the positional "
        "scheme; empty: one stage",
        default=[],
    )
    state: Literal["reset", "carry"] = counts_if_changed(
        "carry: recurrent layers, and attention with a window, continue from the previous window "
        "of the same document; the sequences of a batch read consecutive windows. reset: every "
        "window starts without a state",
        default="reset",
    )
    grad_clip: float | None = setting(
        1.0, "maximum norm of the whole gradient; null: no clipping", gt=0
    )
    on_nonfinite: NonFiniteSettings = may_change(
        StopOnNonFinite(), "what to do if the loss or gradient of a step is not finite"
    )
    on_spike: SpikeSettings | None = counts_if_changed(
        "skip steps with a loss spike; null: apply them"
    )
    z_loss: float | None = counts_if_changed(
        "coefficient of (ln Z)² in the gradients, 1e-4 in PaLM (arXiv:2204.02311); reported "
        "losses exclude it; null: none",
        gt=0,
    )
    ema: EmaSettings | None = counts_if_changed(
        "a moving average of the weights, for validation, samples, evaluate.py and generate.py; "
        "null: none"
    )
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto",
        "auto: bfloat16 autocast on GPUs that support it, and on CPUs that support it for models "
        "of width 96 and more; float16 autocast with loss scaling on other GPUs; otherwise "
        "float32. The settings file of the run has the choice",
    )
    residual_dtype: Literal["float32", "autocast"] = counts_if_changed(
        "dtype of the residual stream under autocast: float32, or the dtype of matrix products, "
        "which takes less memory and time on a GPU; norms are computed in float32 either way",
        "float32",
    )
    compile: bool | None = may_change(
        None,
        "torch.compile: takes about a minute at the start and makes steps faster; null: on GPUs, "
        "not on CPUs",
    )
    cuda_graphs: bool = may_change(
        False,
        "record the compiled forward and backward passes as CUDA graphs, whose kernels need no "
        "launch by the host; for one GPU, and windows of one length with plain positions",
    )
    parallel: ParallelSettings = may_change(ParallelSettings(), "how processes share the run")
    num_threads: int | None = may_change(
        None,
        "number of CPU threads; null: torch's default",
        ge=1,
    )
    log_interval: int = may_change(
        10, "steps between lines on the terminal, and between rates in metrics.jsonl", ge=1
    )
    checkpoint: CheckpointSettings = setting(
        CheckpointSettings(), "when to save checkpoints, and which to keep"
    )
    validation: ValidationSettings = setting(ValidationSettings(), "held-out loss during training")
    samples: SampleSettings = setting(SampleSettings(), "text generated during training")
    wandb: WandbSettings = setting(WandbSettings(), "logging to Weights & Biases")

    @model_validator(mode="after")
    def _micro_batch_is_part_of_batch(self) -> "TrainingSettings":
        if (size := self.micro_batch_size) is not None and size > self.batch_size:
            raise ValueError(f"micro_batch_size {size} is larger than batch_size {self.batch_size}")
        return self
