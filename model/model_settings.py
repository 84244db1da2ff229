"""Model settings, and which of them can be overridden on a trained checkpoint."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from errors import ModelError
from model.position import SCHEMES, PositionSettings
from model.position.schemes.rope import RopeSettings
from settings.fields import StrictSettings


def _union(*choices: type[BaseModel]) -> Any:
    """A union of the choices, discriminated by `name`."""
    return Annotated[functools.reduce(operator.or_, choices), Field(discriminator="name")]


_SCHEMES = [settings for settings, _ in SCHEMES.values()]
if TYPE_CHECKING:
    Scheme = PositionSettings
else:
    Scheme = _union(*_SCHEMES)


class PatternSettings(StrictSettings):
    """Layers of several kinds: a list of kind names, repeated over the depth, and a scheme per
    kind."""

    name: Literal["pattern"] = "pattern"
    layers: list[str] = Field(
        min_length=1, description="kind of each layer from the first, repeated"
    )
    kinds: dict[str, Scheme] = Field(min_length=1, description="positional scheme of each kind")

    @model_validator(mode="after")
    def _kinds_and_layers_agree(self) -> PatternSettings:
        for kind in self.layers:
            if kind not in self.kinds:
                raise ValueError(f"layer kind '{kind}' is not among kinds: {', '.join(self.kinds)}")
        for kind in self.kinds:
            if kind not in self.layers:
                raise ValueError(f"kind '{kind}' is used by no layer")
        return self


if TYPE_CHECKING:
    AnyPosition = PositionSettings | PatternSettings
else:
    AnyPosition = _union(*_SCHEMES, PatternSettings)


class AttentionMixer(StrictSettings):
    """Softmax attention."""

    name: Literal["attention"] = "attention"


class LinearMixer(StrictSettings):
    """Linear attention: constant cost and memory per token, with sums instead of cached keys (Su
    2021)."""

    name: Literal["linear"] = "linear"
    form: Literal["numerator", "cosine"] = Field(
        "numerator",
        description="weights φ(q)·φ(k) with φ = elu + 1, positions in the numerator only; or 1 + "
        "cos(q, k)",
    )
    chunk: int = Field(
        64,
        ge=1,
        description="tokens per chunk; does not change the result",
    )


class MupSettings(StrictSettings):
    """Maximal update parametrization (Yang et al. 2022, arXiv:2203.03466, table 8): a learning rate
    tuned at one width transfers to other widths. At the base width it equals the standard
    parametrization."""

    base_dim: int = Field(ge=1, description="width C at which learning rates were tuned")
    base_head_dim: int | None = Field(
        None,
        ge=1,
        description="head dimension at the base width: logits are q·k·√base_head_dim / D; null: "
        "all widths have the same head dimension, and logits are q·k / √D",
    )


_COUNTS_IF_CHANGED: dict[str, Any] = {"counts_if_changed": True}
_Multiplier = Annotated[
    float, Field(gt=0, allow_inf_nan=False, json_schema_extra=_COUNTS_IF_CHANGED)
]
_DERIVED = ("kv_heads", "head_dim", "ffn_dim")


class ModelSettings(StrictSettings):
    """A LLaMA-style decoder."""

    dim: int = Field(256, ge=1, description="width C of the residual stream")
    layers: int = Field(6, ge=1, description="number of blocks")
    heads: int = Field(8, ge=1, description="query heads H")
    kv_heads: int = Field(
        default_factory=lambda sizes: sizes["heads"],
        ge=1,
        description="key/value heads G, dividing H; null: as many as H",
    )
    head_dim: int = Field(
        default_factory=lambda sizes: sizes["dim"] // sizes["heads"],
        ge=1,
        description="dimension D of each head; null: dim / heads",
    )
    ffn_dim: int = Field(
        default_factory=lambda sizes: -(-8 * sizes["dim"] // 3 // 32) * 32,
        ge=1,
        description="width of the SwiGLU layer; null: 8/3 dim, rounded up to a multiple of 32",
    )
    qk_norm: bool | Literal["all_heads"] = Field(
        False,
        description="RMSNorm on queries and keys before positions: of each head, or of all heads "
        "together (OLMo 2)",
    )
    norm_placement: Literal["input", "output"] = Field(
        "input",
        description="RMSNorm on the input of attention and MLP (pre-norm), or on their output "
        "before it is added to the residual stream (OLMo 2)",
        json_schema_extra=_COUNTS_IF_CHANGED,
    )
    attention_bias: Literal["none", "qkv", "all"] = Field(
        "none",
        description="biases of the attention projections: of queries, keys and values (Qwen2), or "
        "all four",
        json_schema_extra=_COUNTS_IF_CHANGED,
    )
    mlp_bias: bool = Field(
        False, description="biases of the MLP's projections", json_schema_extra=_COUNTS_IF_CHANGED
    )
    embedding_multiplier: _Multiplier = Field(
        1.0, description="factor on token embeddings (Granite)"
    )
    residual_multiplier: _Multiplier = Field(
        1.0,
        description="factor on the output of attention and MLP before it is added to the residual "
        "stream (Granite)",
    )
    attention_multiplier: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="factor on q·k (Granite); null: 1/√D, or the scale of mup",
        json_schema_extra=_COUNTS_IF_CHANGED,
    )
    logit_divisor: _Multiplier = Field(
        1.0,
        description="the head's output is divided by this (Granite's logits_scaling)",
    )
    tie_embeddings: bool = Field(False, description="tie the output head to the token embedding")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")
    logit_softcap: float | None = Field(
        None, gt=0, description="logits become c·tanh(logits / c); null: no cap"
    )
    mixer: AttentionMixer | LinearMixer = Field(
        AttentionMixer(), discriminator="name", description="token mixer"
    )
    mup: MupSettings | None = Field(
        None,
        description="learning rates that transfer across widths: matrices use lr · base_dim / "
        "dim, and the head's input is divided by dim / base_dim; null: standard parametrization",
        json_schema_extra=_COUNTS_IF_CHANGED,
    )
    position: AnyPosition = Field(RopeSettings.model_validate({}), description="positional scheme")

    @model_validator(mode="before")
    @classmethod
    def _null_is_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            key: value for key, value in values.items() if value is not None or key not in _DERIVED
        }

    @model_serializer(mode="wrap")
    def _only_given_sizes(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit derived sizes, so that they follow later overrides of the sizes they derive from."""
        unset = set(_DERIVED) - self.model_fields_set
        return {key: value for key, value in dump(self).items() if key not in unset}

    @model_validator(mode="after")
    def _every_kind_has_a_layer(self) -> ModelSettings:
        if isinstance(self.position, PatternSettings):
            for kind in self.position.kinds:
                if kind not in self.layer_kinds:
                    first = self.position.layers.index(kind) + 1
                    raise ValueError(
                        f"layers = {self.layers} does not use kind '{kind}', layer {first} of the "
                        f"pattern: set model.layers to at least {first}, or shorten "
                        "model.position.layers"
                    )
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSettings:
        if "head_dim" not in self.model_fields_set and self.dim % self.heads:
            raise ValueError(
                f"dim {self.dim} is not divisible by heads {self.heads}: change one of them or "
                "set head_dim"
            )
        if self.mup and self.mup.base_head_dim and isinstance(self.mixer, LinearMixer):
            raise ValueError(
                "mup.base_head_dim: linear attention (mixer.name = linear) does not scale q·k; "
                "leave it out"
            )
        if self.attention_multiplier is not None:
            if self.mup and self.mup.base_head_dim:
                raise ValueError(
                    "attention_multiplier and mup.base_head_dim both set the scale of q·k: leave "
                    "one out"
                )
            if isinstance(self.mixer, LinearMixer):
                raise ValueError(
                    "attention_multiplier: linear attention (mixer.name = linear) does not scale "
                    "q·k; leave it out"
                )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} are not divisible by kv_heads {self.kv_heads}")
        return self

    @property
    def width_ratio(self) -> float:
        """dim / mup.base_dim; 1 without `mup`."""
        return self.dim / self.mup.base_dim if self.mup else 1.0

    @property
    def attention_scale(self) -> float:
        """Factor on q·k: 1/√D, √D₀/D if `mup` sets the base head dimension D₀, or
        `attention_multiplier`."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        base = self.mup.base_head_dim if self.mup else None
        return self.head_dim**-0.5 if base is None else base**0.5 / self.head_dim

    @property
    def is_pattern(self) -> bool:
        """Whether the layers are of several kinds."""
        return isinstance(self.position, PatternSettings)

    @property
    def kinds(self) -> dict[str, Any]:
        """The scheme of each layer kind; one kind named ``all`` without a pattern."""
        return (
            self.position.kinds
            if isinstance(self.position, PatternSettings)
            else {"all": self.position}
        )

    def describe_positions(self, length: int, original_length: int) -> str:
        """The schemes of all layer kinds, e.g. `near = rope | far = none`."""
        found = {
            kind: choice.describe(length, original_length) for kind, choice in self.kinds.items()
        }
        return (
            " | ".join(f"{kind} = {s}" for kind, s in found.items())
            if self.is_pattern
            else found["all"]
        )

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of each layer."""
        names = self.position.layers if isinstance(self.position, PatternSettings) else ["all"]
        return [names[i % len(names)] for i in range(self.layers)]


def legal_overrides(trained: ModelSettings) -> str:
    """The position settings that can be overridden at test time, for each layer kind."""
    whose = "layers of kind '{}'" if trained.is_pattern else "a checkpoint"
    return "; ".join(
        f"legal for {whose.format(kind)} trained with '{choice.name}': "
        f"{', '.join(sorted(choice.test_time))}"
        for kind, choice in trained.kinds.items()
    )


def check_override(trained: ModelSettings, asked: ModelSettings) -> None:
    """Check that a checkpoint trained with `trained` can be evaluated with other settings.

    Raises:
        ModelError: a key that cannot be overridden; the message lists those that can.
    """
    legal = legal_overrides(trained)
    for key in type(trained).model_fields:
        if key != "position" and getattr(trained, key) != getattr(asked, key):
            raise ModelError(
                f"model.{key} is part of the trained weights and cannot be changed after "
                f"training; {legal}"
            )
    if trained.layer_kinds != asked.layer_kinds or set(trained.kinds) != set(asked.kinds):
        raise ModelError(
            f"model.position: the pattern of layers cannot be changed after training; {legal}"
        )
    for kind, old in trained.kinds.items():
        new = asked.kinds[kind]
        where = f"model.position.kinds.{kind}" if trained.is_pattern else "model.position"
        if old.name != new.name:
            raise ModelError(
                f"{where}.name: trained with '{old.name}', cannot become '{new.name}'; {legal}"
            )
        for key in type(old).model_fields:
            if key not in old.test_time and getattr(old, key) != getattr(new, key):
                raise ModelError(f"{where}.{key} cannot be changed after training; {legal}")
        for a, b in ((old, new), (new, old)):
            if a.temperature.learned and a.temperature.name != b.temperature.name:
                raise ModelError(
                    f"{where}.temperature: '{a.temperature.name}' is learned and cannot be added "
                    f"or removed after training; {legal}"
                )
