"""Settings of optimizers and of learning rates over time."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from training.config.trainer_settings import Settings, ShareOrSteps, share_or_steps


class RoleSettings(Settings):
    """What is particular about the weights of one role."""

    lr: float | None = Field(
        default=None, gt=0, description="peak learning rate, on the same schedule; null: the optimizer's"
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="null: the optimizer's for matrices and the head, none for the others"
    )


class RolesSettings(Settings):
    """Weights by their role."""

    matrices: RoleSettings = Field(default=RoleSettings(), description="of linear layers, but for the head")
    head: RoleSettings = Field(default=RoleSettings(), description="the head, where it is not tied")
    embeddings: RoleSettings = Field(default=RoleSettings(), description="embeddings, a tied head with them")
    vectors: RoleSettings = Field(default=RoleSettings(), description="norms and biases")
    positions: RoleSettings = Field(default=RoleSettings(), description="what positional schemes learn")

    def of(self, role: str) -> RoleSettings:
        return getattr(self, role)


ROLES = tuple(RolesSettings.model_fields)


class AdamWBase(Settings):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), of whatever weights another rule leaves."""

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
    groups: RolesSettings | None = Field(
        default=None,
        description="rates and decay of their own, by role",
        json_schema_extra={"counts_if_given": True},
    )

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"each of betas must be at least 0 and less than 1, not {list(betas)}")
        return betas

    @model_validator(mode="after")
    def _one_rate_for_positions(self) -> "AdamWBase":
        if self.positions_lr is not None and self.of("positions").lr is not None:
            raise ValueError("positions_lr and groups.positions.lr are the same thing: give one of them")
        return self

    def of(self, role: str) -> RoleSettings:
        """What is said of a role's weights."""
        return RoleSettings() if self.groups is None else self.groups.of(role)

    def rate_of(self, role: str) -> float | None:
        """The peak rate a role has of its own."""
        return self.positions_lr if role == "positions" and self.positions_lr else self.of(role).lr

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rates by the names they have in metrics.jsonl."""
        own = {f"{role}_lr": rate for role in ROLES if (rate := self.rate_of(role)) is not None}
        return {"lr": self.lr} | own


class AdamWSettings(AdamWBase):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); decay on matrices only."""

    name: Literal["adamw"] = "adamw"


class MuonSettings(Settings):
    """Muon for matrices (Jordan 2024, kellerjordan.github.io/posts/muon), AdamW for all other weights."""

    name: Literal["muon"] = "muon"
    lr: float = Field(default=2e-3, gt=0, description="peak learning rate of matrices")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of the mean of gradients")
    nesterov: bool = Field(default=True, description="look ahead by one gradient")
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices")
    iterations: int = Field(
        default=5, ge=1, lt=100, description="Newton-Schulz steps, in bfloat16, towards an orthogonal update"
    )
    adjust: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="size of an A × B update: 0.2·√max(A, B), so that rates are like AdamW's (Liu et al. "
        "2025, arXiv:2502.16982), or √max(1, A / B), with rates around 0.02",
    )
    adamw: AdamWBase = Field(
        default_factory=AdamWBase, description="of the head, embeddings, norms, biases and positions"
    )

    @model_validator(mode="after")
    def _matrices_are_not_adamws(self) -> "MuonSettings":
        if self.adamw.of("matrices") != RoleSettings():
            raise ValueError("adamw.groups.matrices: matrices are Muon's; set lr and weight_decay beside it")
        return self

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rates by the names they have in metrics.jsonl."""
        own = self.adamw.rates
        return {"lr": self.lr, "adamw_lr": own.pop("lr")} | own


OptimizerSettings = Annotated[AdamWSettings | MuonSettings, Field(discriminator="name")]


def _share_or_many_steps(value: float) -> float:
    return value if value == 1 else share_or_steps(value)


class EmaSettings(Settings):
    """An exponential mean of the weights, for evaluation."""

    decay: float = Field(
        default=0.999,
        gt=0,
        lt=1,
        description="of the mean, each step; it remembers some 1 / (1 − decay) steps",
    )
    start: ShareOrSteps = Field(
        default=0.0,
        ge=0,
        description="before it the mean is the weights: below 1 a share of the run, from 1 on steps",
    )


class _Schedule(Settings):
    warmup: ShareOrSteps = Field(
        default=0.02,
        ge=0,
        description="linear rise from 0: below 1 a share of the run, from 1 on a number of steps",
    )


class CosineSchedule(_Schedule):
    """Half a cosine from the peak to `min_lr_ratio`."""

    name: Literal["cosine"] = "cosine"
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )


class LinearSchedule(_Schedule):
    """A straight line from the peak to `min_lr_ratio`."""

    name: Literal["linear"] = "linear"
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )


class WsdSchedule(_Schedule):
    """Warm-up, stable, decay: the peak is held, then a straight line to `min_lr_ratio` (arXiv:2404.06395)."""

    name: Literal["wsd"] = "wsd"
    decay: Annotated[float, AfterValidator(_share_or_many_steps)] = Field(
        default=0.2,
        gt=0,
        description="the fall at the end: up to 1 a share of the run, above 1 a number of steps",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )


class ConstantSchedule(_Schedule):
    """The peak is held to the end."""

    name: Literal["constant"] = "constant"


ScheduleSettings = Annotated[
    CosineSchedule | LinearSchedule | WsdSchedule | ConstantSchedule, Field(discriminator="name")
]
