"""Settings of optimizers, of the EMA and of learning-rate schedules."""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from settings.fields import StrictSettings, setting


def share_or_steps(value: float) -> float:
    """Raise ValueError unless `value` is a share below 1 or a whole number of steps."""
    if value >= 1 and value != int(value):
        raise ValueError(f"{value:g} is neither a share (below 1) nor a whole number of steps")
    return value


ShareOrSteps = Annotated[float, AfterValidator(share_or_steps)]


def as_steps(value: float, steps: int) -> int:
    """A setting in steps: below 1 it is a share of the run's steps, which is rounded."""
    return round(value * steps) if value < 1 else int(value)


class AdamWBase(StrictSettings):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) for all weights that Muon does not
    update."""

    lr: float = setting(2e-3, "peak learning rate", gt=0)
    positions_lr: float | None = setting(
        None,
        "peak learning rate of parameters of the positional scheme, on the same schedule; null: lr",
        gt=0,
    )
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the two moments, each in [0, 1)")
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(
        0.1, "of matrices; embeddings, norms, biases and positions have none", ge=0
    )

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"each of betas must be at least 0 and less than 1, not {list(betas)}")
        return betas

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
        "decay of the mean of gradients",
        ge=0,
        lt=1,
    )
    nesterov: bool = setting(True, "Nesterov momentum")
    weight_decay: float = setting(0.1, "of matrices", ge=0)
    iterations: int = setting(
        5, "Newton-Schulz steps, in bfloat16, towards an orthogonal update", ge=1, lt=100
    )
    adjust: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw",
        "size of an A × B update: 0.2·√max(A, B), so that rates are like AdamW's (Liu et al. "
        "2025, arXiv:2502.16982), or √max(1, A / B), with rates around 0.02",
    )
    adamw: AdamWBase = setting(AdamWBase(), "of the head, embeddings, norms, biases and positions")

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rates by their names in metrics.jsonl."""
        own = self.adamw.rates
        return {"lr": self.lr, "adamw_lr": own.pop("lr")} | own


OptimizerSettings = Annotated[AdamWSettings | MuonSettings, Field(discriminator="name")]


class EmaSettings(StrictSettings):
    """An exponential moving average of the weights, for evaluation."""

    decay: float = setting(
        0.999, "decay of the mean per step; its window is about 1 / (1 − decay)", gt=0, lt=1
    )
    start: ShareOrSteps = setting(
        0.0, "before it the mean is the weights: below 1 a share of the run, from 1 on steps", ge=0
    )


class _Schedule(StrictSettings):
    warmup: ShareOrSteps = setting(
        0.02, "linear rise from 0: below 1 a share of the run, from 1 on a number of steps", ge=0
    )

    def rate(self, peak: float, step: int, steps: int) -> float:
        """Learning rate of update `step` (0 .. steps − 1) of a run of `steps` updates.

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
        return peak * self.ratio(step, steps, warmup)

    def ratio(self, step: int, steps: int, warmup: int) -> float:
        """The rate of an update after the warm-up, as a share of the peak."""
        return 1.0


_MIN_LR_RATIO = "learning rate at the end, as a share of the peak"


def _decayed(least: float, left: float) -> float:
    """From 1 to `least` as the share of the decay that is left goes from 1 to 0."""
    return least + (1 - least) * left


class CosineSchedule(_Schedule):
    """Half a cosine from the peak to `min_lr_ratio`."""

    name: Literal["cosine"] = "cosine"
    min_lr_ratio: float = setting(0.1, _MIN_LR_RATIO, ge=0, le=1)

    def ratio(self, step: int, steps: int, warmup: int) -> float:
        left = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        return _decayed(self.min_lr_ratio, left)


class LinearSchedule(_Schedule):
    """Linear decay from the peak to `min_lr_ratio`."""

    name: Literal["linear"] = "linear"
    min_lr_ratio: float = setting(0.0, _MIN_LR_RATIO, ge=0, le=1)

    def ratio(self, step: int, steps: int, warmup: int) -> float:
        return _decayed(self.min_lr_ratio, 1 - (step - warmup) / (steps - warmup))


class WsdSchedule(_Schedule):
    """Warmup, stable, decay: constant at the peak, then linear decay to `min_lr_ratio`
    (arXiv:2404.06395)."""

    name: Literal["wsd"] = "wsd"
    decay: Annotated[float, AfterValidator(lambda v: v if v == 1 else share_or_steps(v))] = setting(
        0.2, "decay at the end: up to 1 a share of the run, above 1 a number of steps", gt=0
    )
    min_lr_ratio: float = setting(0.0, _MIN_LR_RATIO, ge=0, le=1)

    def ratio(self, step: int, steps: int, warmup: int) -> float:
        # at least one step; a decay of 1 is the whole run
        decay = steps if self.decay == 1 else max(1, as_steps(self.decay, steps))
        return _decayed(self.min_lr_ratio, min(1.0, (steps - step) / decay))


class ConstantSchedule(_Schedule):
    """Constant at the peak."""

    name: Literal["constant"] = "constant"


ScheduleSettings = Annotated[
    CosineSchedule | LinearSchedule | WsdSchedule | ConstantSchedule, Field(discriminator="name")
]
