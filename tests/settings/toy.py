"""A small settings tree that uses every feature of the loader, and a small model."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn


class S(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NoScaling(S):
    """Frequencies as they are."""

    name: Literal["none"] = "none"


class Yarn(S):
    """NTK by parts."""

    name: Literal["yarn"] = "yarn"
    factor: float | Literal["auto"] = Field("auto", ge=1, description="stretch")


class Rope(S):
    """Rotations (Su et al. 2021). More."""

    name: Literal["rope"] = "rope"
    theta: float = Field(10000.0, gt=0, description="base of the frequencies")
    window: int | None = Field(None, ge=1, description="keys a query may see")
    scaling: Annotated[NoScaling | Yarn, Field(discriminator="name")] = Field(
        NoScaling(), description="rule"
    )


class Alibi(S):
    name: Literal["alibi"] = "alibi"
    window: int | None = Field(None, ge=1, description="keys a query may see")


class Pattern(S):
    name: Literal["pattern"] = "pattern"
    layers: list[str] = Field(description="kind of each layer")
    kinds: dict[str, Annotated[Rope | Alibi, Field(discriminator="name")]] = Field(
        description="the kinds"
    )


class Model(S):
    dim: int = Field(64, ge=8, le=512, description="width")
    tie_embeddings: bool = Field(True, description="head shares the embedding")
    position: Annotated[Rope | Alibi | Pattern, Field(discriminator="name")] = Field(
        Rope(), description="order"
    )


class Optimizer(S):
    lr: float = Field(1e-3, gt=0, le=10, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="moments")


class Training(S):
    tokens: int = Field(1000, ge=1, description="budget")
    interval: int = Field(10, ge=1, description="cadence", json_schema_extra={"may_change": True})
    mode: Literal["disabled", "offline"] = Field("disabled", description="mirror")
    project: str = Field("x", description="project")
    prompts: list[str] = Field(["def "], description="prompts")
    optimizer: Optimizer = Field(Optimizer(), description="optimizer")


class Root(S):
    train_length: int = Field(256, ge=2, description="tokens of a window")
    model: Model = Field(Model(), description="the model")
    training: Training = Field(Training(), description="the training")

    @model_validator(mode="after")
    def _budget(self):
        if self.training.tokens < self.train_length:
            raise ValueError("training.tokens is less than train_length")
        return self


class Net(nn.Module):
    """Embedding, matrix, bias, norm, a learned position table, and a head that may be tied."""

    def __init__(self, vocabulary: int = 11, dim: int = 6, tie_embeddings: bool = True):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(9, dim)
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(x + self.mix(x)))
