"""Settings of optimizers and of learning rates over time."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from training.settings_base import Settings


class AdamWSettings(Settings):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); decay on matrices only."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=2e-3, gt=0, description="peak learning rate")
    positions_lr: float | None = Field(
        default=None,
        gt=0,
        description="peak learning rate of what positional schemes learn, on the same schedule; null: lr",
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="decay of the two moments, each in [0, 1)"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(
        default=0.1, ge=0, description="of matrices; embeddings, norms, biases and positions have none"
    )

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"each of betas must be at least 0 and less than 1, not {list(betas)}")
        return betas


def _share_or_steps(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError(f"{value:g} is neither a share (below 1) nor a whole number of steps")
    return value


ShareOrSteps = Annotated[float, AfterValidator(_share_or_steps)]


class _Schedule(Settings):
    warmup: ShareOrSteps = Field(
        default=0.02,
        ge=0,
        description="linear rise from 0: below 1 a share of the run, from 1 on a number of steps",
    )


class CosineSchedule(_Schedule):
    """Half a cosine from the peak to `final`."""

    name: Literal["cosine"] = "cosine"
    final: float = Field(
        default=0.1, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )


class LinearSchedule(_Schedule):
    """A straight line from the peak to `final`."""

    name: Literal["linear"] = "linear"
    final: float = Field(
        default=0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )


class WsdSchedule(_Schedule):
    """Warm-up, stable, decay: the peak is held, then a straight line to `final` (arXiv:2404.06395)."""

    name: Literal["wsd"] = "wsd"
    decay: float = Field(
        default=0.2, gt=0, le=1, description="share of the run spent in the decay at its end"
    )
    final: float = Field(
        default=0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )


class ConstantSchedule(_Schedule):
    """The peak is held to the end."""

    name: Literal["constant"] = "constant"


ScheduleSettings = Annotated[
    CosineSchedule | LinearSchedule | WsdSchedule | ConstantSchedule, Field(discriminator="name")
]
