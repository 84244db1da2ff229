"""A small settings tree that uses every feature of the loader."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from settings.fields import StrictSettings


class NoScaling(StrictSettings):
    """Frequencies as they are."""

    name: Literal["none"] = "none"


class Yarn(StrictSettings):
    """NTK by parts."""

    name: Literal["yarn"] = "yarn"
    factor: float | Literal["auto"] = Field("auto", ge=1, description="stretch")


class Rope(StrictSettings):
    """Rotations (Su et al. 2021). More."""

    name: Literal["rope"] = "rope"
    theta: float = Field(10000.0, gt=0, description="base of the frequencies")
    window: int | None = Field(None, ge=1, description="keys a query may see")
    scaling: Annotated[NoScaling | Yarn, Field(discriminator="name")] = Field(
        NoScaling(), description="rule"
    )


class Alibi(StrictSettings):
    name: Literal["alibi"] = "alibi"
    window: int | None = Field(None, ge=1, description="keys a query may see")


class Pattern(StrictSettings):
    name: Literal["pattern"] = "pattern"
    layers: list[str] = Field(description="kind of each layer")
    kinds: dict[str, Annotated[Rope | Alibi, Field(discriminator="name")]] = Field(
        description="the kinds"
    )


class Model(StrictSettings):
    dim: int = Field(64, ge=8, le=512, description="width")
    tie_embeddings: bool = Field(True, description="head shares the embedding")
    position: Annotated[Rope | Alibi | Pattern, Field(discriminator="name")] = Field(
        Rope(), description="order"
    )


class Optimizer(StrictSettings):
    lr: float = Field(1e-3, gt=0, le=10, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="moments")


class Training(StrictSettings):
    tokens: int = Field(1000, ge=1, description="budget")
    interval: int = Field(10, ge=1, description="cadence", json_schema_extra={"may_change": True})
    mode: Literal["disabled", "offline"] = Field("disabled", description="mirror")
    project: str = Field("x", description="project")
    prompts: list[str] = Field(["def "], description="prompts")
    optimizer: Optimizer = Field(Optimizer(), description="optimizer")


class Root(StrictSettings):
    train_length: int = Field(256, ge=2, description="tokens of a window")
    model: Model = Field(Model(), description="the model")
    training: Training = Field(Training(), description="the training")

    @model_validator(mode="after")
    def _budget(self):
        if self.training.tokens < self.train_length:
            raise ValueError("training.tokens is less than train_length")
        return self
