"""Model settings, and which of them can be overridden on a trained checkpoint."""

from __future__ import annotations

import functools
import operator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from errors import ModelError
from model.mixers import MIXERS
from model.mixers.mixer import Gate, LayerKind, MixerSettings, NormPlacement
from model.mixers.softmax import AttentionMixer
from model.position import SCHEMES, PositionSettings
from model.position.schemes.rope import RopeSettings
from settings.fields import StrictSettings, counts_if_changed, setting
from settings.load import identifying, merge


def _union(*choices: type[BaseModel]) -> Any:
    """A union of the choices, discriminated by `name`."""
    return Annotated[functools.reduce(operator.or_, choices), Field(discriminator="name")]


if TYPE_CHECKING:
    AnyPosition = PositionSettings
    AnyMixer = MixerSettings
else:
    AnyPosition = _union(*(settings for settings, _ in SCHEMES.values()))
    AnyMixer = _union(*(settings for settings, _ in MIXERS.values()))


def _own(description: str, **limits: Any) -> Any:
    """A setting in which a layer kind may differ from the model."""
    return counts_if_changed(f"{description}; null: as in the model", **limits)


class LayerKindSettings(StrictSettings):
    """The settings in which the layers of one kind differ from the model. A mapping without a
    `name` changes settings of the model's mixer or scheme."""

    mixer: AnyMixer | None = _own("token mixer")
    position: AnyPosition | None = _own("positional scheme")
    gate: Gate | None = _own("gate of the mixer's output")
    norm_placement: NormPlacement | None = _own("placement of norms")
    heads: int | None = _own("query heads H", ge=1)
    kv_heads: int | None = _own("key/value heads G", ge=1)
    head_dim: int | None = _own("dimension D of each head", ge=1)

    @model_serializer(mode="wrap")
    def _only_own(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


class MupSettings(StrictSettings):
    """Maximal update parametrization (Yang et al. 2022, arXiv:2203.03466, table 8): a learning rate
    tuned at one width transfers to other widths. At the base width it equals the standard
    parametrization."""

    base_dim: int = Field(ge=1, description="width C at which learning rates were tuned")
    base_head_dim: int | None = setting(
        None,
        "head dimension at the base width: logits are q·k·√base_head_dim / D; null: "
        "all widths have the same head dimension, and logits are q·k / √D",
        ge=1,
    )


Activation = Literal["silu", "gelu_tanh"]
CanonPlace = Literal["A", "B", "C", "D"]
_DERIVED = ("kv_heads", "head_dim", "ffn_dim")
_CHOICES = {"mixer", "position"}  # settings of a kind that are chosen by name


class ModelSettings(StrictSettings):
    """A LLaMA-style decoder."""

    dim: int = setting(256, "width C of the residual stream", ge=1)
    layers: int = setting(6, "number of blocks", ge=1)
    heads: int = setting(8, "query heads H", ge=1)
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
        description="width of the gated MLP; null: 8/3 dim, rounded up to a multiple of 32",
    )
    qk_norm: bool | Literal["all_heads"] = setting(
        False,
        "RMSNorm on queries and keys before positions: of each head, or of all heads "
        "together (OLMo 2)",
    )
    value_norm: bool = counts_if_changed(
        "RMSNorm without a weight on the values of each head (Gemma 4)",
        False,
    )
    norm_placement: NormPlacement = counts_if_changed(
        "RMSNorm on the input of attention and MLP (pre-norm), on their output before "
        "it is added to the residual stream (OLMo 2), or both (Gemma 3)",
        "input",
    )
    attention_bias: Literal["none", "qkv", "all"] = counts_if_changed(
        "biases of the attention projections: of queries, keys and values (Qwen2), or all four",
        "none",
    )
    activation: Activation = counts_if_changed(
        "activation of the MLP's gate: SiLU, or GELU by its tanh formula (Gemma 3)",
        "silu",
    )
    mlp_bias: bool = counts_if_changed("biases of the MLP's projections", False)
    embedding_multiplier: float = counts_if_changed(
        "factor on token embeddings (Granite, Gemma 3)",
        1.0,
        gt=0,
    )
    residual_multiplier: float = counts_if_changed(
        "factor on the output of attention and MLP before it is added to the residual "
        "stream (Granite)",
        1.0,
        gt=0,
    )
    layer_scale: bool = counts_if_changed(
        "multiply the output of each layer by a learned number (Gemma 4)",
        False,
    )
    attention_multiplier: float | None = counts_if_changed(
        "factor on q·k (Granite, Gemma 3); null: 1/√D, or the scale of mup",
        gt=0,
    )
    logit_divisor: float = counts_if_changed(
        "the head's output is divided by this (Granite's logits_scaling)",
        1.0,
        gt=0,
    )
    tie_embeddings: bool = setting(False, "tie the output head to the token embedding")
    norm_eps: float = setting(1e-5, "epsilon of RMSNorm", gt=0)
    logit_softcap: float | None = setting(
        None,
        "logits become c·tanh(logits / c); null: no cap",
        gt=0,
    )
    mixer: AnyMixer = setting(AttentionMixer(), "token mixer")
    gate: Gate = counts_if_changed(
        "gate of attention's output before its projection, sigmoid(x Wg) of the layer "
        "input: one number per head or per channel",
        "none",
    )
    canon: tuple[CanonPlace, ...] = counts_if_changed(
        "Canon layers, which add a convolution over the last tokens: before the token mixer (A), "
        "on queries, keys and values of softmax attention (B), before (C) and in (D) the MLP",
        (),
    )
    canon_width: int = counts_if_changed(
        "number of tokens that a Canon layer reads, including its own", 4, ge=2
    )
    mup: MupSettings | None = counts_if_changed(
        "learning rates that transfer across widths: matrices use lr · base_dim / "
        "dim, and the head's input is divided by dim / base_dim; null: standard parametrization"
    )
    position: AnyPosition = setting(RopeSettings.model_validate({}), "positional scheme")
    pattern: tuple[str, ...] = counts_if_changed(
        "kind of each layer, from the first on, repeated as needed; empty: all layers are alike",
        (),
    )
    kinds: dict[str, LayerKindSettings] = counts_if_changed(
        "the kinds of layers in `pattern`, each with the settings that differ from the model's",
        {},
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {
            key: value
            for key, value in values.items()
            if value is not None or key not in (*_DERIVED, "pattern", "kinds")
        }
        kinds = values.get("kinds")
        if isinstance(kinds, dict):
            values["kinds"] = dict(kinds)
            for key in _CHOICES:
                _merge_into_kinds(values, key, cls.model_fields[key].default)
        return values

    @model_serializer(mode="wrap")
    def _only_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit derived sizes, so that they follow later overrides of the sizes they derive from,
        and settings that no layer uses."""
        omitted = {*_DERIVED} - self.model_fields_set
        omitted |= {key for key in _CHOICES if not self._uses(key)}
        omitted |= set() if self.pattern else {"pattern", "kinds"}
        return {key: value for key, value in dump(self).items() if key not in omitted}

    def _uses(self, key: str) -> bool:
        """Whether some kind of layers uses the model's mixer or scheme (`key`)."""
        return not self.kinds or any(getattr(kind, key) is None for kind in self.kinds.values())

    @model_validator(mode="after")
    def _every_kind_has_a_layer(self) -> ModelSettings:
        unknown = [kind for kind in self.pattern if kind not in self.kinds]
        if unknown:
            raise ValueError(
                f"pattern: layer kind '{unknown[0]}' is not among the kinds "
                f"({', '.join(self.kinds) or 'none'}); add it to model.kinds"
            )
        for kind in self.kinds:
            if kind not in self.layer_kinds:
                raise ValueError(
                    f"kinds: kind '{kind}' is not among the first {self.layers} layers of "
                    "model.pattern; add it there, raise model.layers, or remove the kind"
                )
        for key in _CHOICES:
            if not self._uses(key) and getattr(self, key) != type(self).model_fields[key].default:
                kind = self.pattern[0]
                raise ValueError(
                    f"{key} is used by no layer: every kind of the pattern has its own; remove it, "
                    f"or set model.kinds.{kind}.{key}"
                )
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSettings:
        if "head_dim" not in self.model_fields_set and self.dim % self.heads:
            raise ValueError(
                f"dim {self.dim} is not divisible by heads {self.heads}: change one of them or "
                "set head_dim"
            )
        if self.attention_multiplier is not None and self.mup and self.mup.base_head_dim:
            raise ValueError(
                "attention_multiplier and mup.base_head_dim both set the scale of q·k: leave one "
                "out"
            )
        kinds = self.resolved_kinds
        if not any(kind.mixer.scales_logits for kind in kinds.values()):
            names = ", ".join(dict.fromkeys(kind.mixer.name for kind in kinds.values()))
            for key, factor in (
                ("mup.base_head_dim", self.mup and self.mup.base_head_dim),
                ("attention_multiplier", self.attention_multiplier),
            ):
                if factor is not None:
                    raise ValueError(
                        f"{key}: no layer scales q·k (mixer.name = {names}); leave it out"
                    )
        for name, kind in kinds.items():
            of = f" (model.kinds.{name})" if self.pattern else ""
            if kind.heads % kind.kv_heads:
                raise ValueError(
                    f"heads {kind.heads} are not divisible by kv_heads {kind.kv_heads}{of}; change "
                    "one of them"
                )
        return self

    @property
    def width_ratio(self) -> float:
        """dim / mup.base_dim; 1 without `mup`."""
        return self.dim / self.mup.base_dim if self.mup else 1.0

    def _attention_scale(self, head_dim: int) -> float:
        """Factor on q·k in heads of D features: 1/√D, √D₀/D if `mup` sets the base head dimension
        D₀, or `attention_multiplier`."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        base = self.mup.base_head_dim if self.mup else None
        return head_dim**-0.5 if base is None else base**0.5 / head_dim

    @property
    def resolved_kinds(self) -> dict[str, LayerKind]:
        """The kinds of layers by name; one kind named ``all`` without a pattern."""
        if not self.pattern:
            return {"all": self._resolved(None)}
        return {name: self._resolved(kind) for name, kind in self.kinds.items()}

    def _resolved(self, own: LayerKindSettings | None) -> LayerKind:
        names = {field.name for field in fields(LayerKind)} - {"attention_scale"}
        values = {name: self._value(name, own) for name in names}
        return LayerKind(**values, attention_scale=self._attention_scale(values["head_dim"]))

    def _value(self, key: str, own: LayerKindSettings | None) -> Any:
        """A setting of a kind, or the model's setting if the kind has none."""
        value = getattr(own, key, None)
        return getattr(self, key) if value is None else value

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of each layer."""
        names = self.pattern or ("all",)
        return [names[i % len(names)] for i in range(self.layers)]

    def position_key(self, kind: str) -> str:
        """The key of the positional scheme of a kind of layers."""
        return f"model.kinds.{kind}.position" if self.pattern else "model.position"

    def with_positions(self, schemes: dict[str, PositionSettings]) -> ModelSettings:
        """These settings with another scheme in each kind of layers."""
        if not self.pattern:
            return self.model_copy(update={"position": schemes["all"]})
        kinds = {
            name: kind.model_copy(update={"position": schemes[name]})
            for name, kind in self.kinds.items()
        }
        return self.model_copy(update={"kinds": kinds})

    def positions_record(self) -> dict[str, Any]:
        """The positional schemes as results and manifests record them: the settings of the only
        scheme, or `{name: pattern, layers: ..., kinds: ...}`, the spelling of earlier versions."""
        schemes = {name: identifying(kind.position) for name, kind in self.resolved_kinds.items()}
        if not self.pattern:
            return schemes["all"]
        return {"name": "pattern", "layers": list(self.pattern), "kinds": schemes}

    def describe_positions(self, length: int, original_length: int) -> str:
        """The schemes of all layer kinds, e.g. `near = rope | far = none`."""
        texts = {
            name: kind.position.describe(length, original_length)
            for name, kind in self.resolved_kinds.items()
        }
        if not self.pattern:
            return texts["all"]
        return " | ".join(f"{name} = {text}" for name, text in texts.items())


def _merge_into_kinds(model: dict[str, Any], key: str, default: BaseModel) -> None:
    """Merge the model's mixer or scheme into mappings of kinds without a name, which change some of
    its settings. The model's own is dropped if every kind then has one."""
    choice = model.get(key, default)
    if isinstance(choice, BaseModel):
        choice = choice.model_dump(mode="json")
    elif isinstance(choice, dict) and "name" not in choice:
        choice = model[key] = merge(default.model_dump(mode="json"), choice)
    kinds = model["kinds"]
    is_merged = False
    for name, kind in kinds.items():
        own = kind.get(key) if isinstance(kind, dict) else None
        if isinstance(choice, dict) and isinstance(own, dict) and "name" not in own:
            kinds[name] = {**kind, key: merge(choice, own)}
            is_merged = True
    if is_merged and all(isinstance(kind, dict) and kind.get(key) for kind in kinds.values()):
        model.pop(key, None)


def legal_overrides(trained: ModelSettings) -> str:
    """The position settings that can be overridden at test time, for each layer kind."""
    texts = []
    for name, kind in trained.resolved_kinds.items():
        whose = f"layers of kind '{name}'" if trained.pattern else "a checkpoint"
        keys = ", ".join(sorted(kind.position.test_time))
        texts.append(f"legal for {whose} trained with '{kind.position.name}': {keys}")
    return "; ".join(texts)


def check_override(trained: ModelSettings, asked: ModelSettings) -> None:
    """Check that a checkpoint trained with `trained` can be evaluated with other settings.

    Raises:
        ModelError: a key that cannot be overridden; the message lists those that can.
    """
    legal = legal_overrides(trained)
    for key in type(trained).model_fields:
        if key not in ("position", "kinds") and getattr(trained, key) != getattr(asked, key):
            raise ModelError(
                f"model.{key} is part of the trained weights and cannot be changed after "
                f"training; {legal}"
            )
    if set(trained.kinds) != set(asked.kinds):
        raise ModelError(f"model.kinds: kinds cannot be added or removed after training; {legal}")
    asked_kinds = asked.resolved_kinds
    for name, kind in trained.resolved_kinds.items():
        if replace(asked_kinds[name], position=kind.position) != kind:
            raise ModelError(
                f"model.kinds.{name}: only its position can be changed after training; {legal}"
            )
        old = kind.position
        new = asked_kinds[name].position
        where = trained.position_key(name)
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
