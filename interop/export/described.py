"""Describes the computation of a model by its settings, to compare models in transformers' classes
with ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from interop.huggingface.config import ImportedShape
from interop.huggingface.rope_config import REFERS_TO_LENGTH
from model import SCHEMES, ModelSettings, Transformer
from model.mixers import MIXERS
from model.mixers.mixer import LayerKind
from model.position import PositionalScheme, PositionSettings
from model.position.remap import NoRemap
from model.position.scaling import plain_frequencies
from model.position.schemes.absolute import NoPE
from model.position.schemes.learned_rope import LearnedRope
from model.position.schemes.rope import PRopeSettings, Rope
from model.position.temperature import (
    FixedTemperature,
    HeadTemperature,
    Ministral3Temperature,
    NoTemperature,
)

# Names of settings of each layer, of attention, and of mixers with queries.
LAYER = {field.name for field in fields(LayerKind)} - {"mixer", "position", "attention_scale"}
PROJECTION = {"gate", "qk_norm", "value_norm", "attention_bias"}
HEADS = {"heads", "kv_heads", "head_dim"}
MODIFIERS = set(PositionSettings.model_fields) - {"name", "temperature"}
# Settings of a class, with values, that have no effect with suitable weights.
ABSORBED = {("layer_scale", True), ("sink_logit", "learned")}
# Names of settings of the model, without settings of layers.
SHARED = set(ModelSettings.model_fields) - LAYER - {"mixer", "position", "attention_multiplier"}
SHARED -= {"mup", "pattern", "kinds"}
# our scaling method -> transformers' rope_type
TYPES = {
    "none": "default",
    **{name: name for name in ("linear", "dynamic", "llama3", "yarn", "longrope")},
}
# divisor of the frequency of a pair that is not rotated: sin(n·θ) is below 1e-23 for any n
STILL = 1e30


class NotRepresentable(Exception):
    """No class of transformers has this part of a model; the message is the reason."""


@dataclass(frozen=True)
class RopeTable:
    """The rotation of a layer.

    Attributes:
        theta: base b.
        frequencies: frequency of each pair, in radians per token.
        amplitude: factor on cos and sin.
        layout: `half` or `interleaved`.
        beyond: frequencies and amplitude at four times the original length.
        native: `rope_parameters` with the settings of the scaling method, if transformers has a
            method of the same name; its frequencies may differ.
    """

    theta: float
    frequencies: tuple[float, ...]
    amplitude: float
    layout: str
    beyond: tuple[tuple[float, ...], float]
    native: dict[str, Any] | None

    @property
    def rotation(self) -> tuple:
        """The values that determine the angles at any length."""
        return self.frequencies, self.amplitude, *self.beyond

    def parameters(self, original_length: int, native: bool) -> dict[str, Any]:
        """`rope_parameters`: the native parameters, or LongRoPE with one list of divisors for all
        lengths."""
        if native and self.native:
            return {"rope_theta": self.theta, **self.native}
        plain = plain_frequencies(self.theta, 2 * len(self.frequencies)).tolist()
        divisors = [a / b if b else STILL for a, b in zip(plain, self.frequencies, strict=True)]
        return {
            "rope_theta": self.theta,
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": float(self.amplitude),
            "original_max_position_embeddings": original_length,
        }


def rope_table(scheme: PositionalScheme) -> RopeTable | None:
    """The rotation of a scheme; None without positions. Raises NotRepresentable if its positions
    are not rotations by fixed frequencies."""
    if isinstance(scheme, NoPE):
        return None
    if isinstance(scheme, LearnedRope):
        learned = tuple(scheme.frequencies().detach().double().tolist())
        s = scheme.settings
        return RopeTable(s.theta, learned, 1.0, s.layout, (learned, 1.0), None)
    assert isinstance(scheme, Rope)
    settings = scheme.settings
    if not isinstance(settings.remap, NoRemap):
        raise NotRepresentable(f"remap {settings.remap.name} treats pairs differently by distance")
    if settings.imaginary:
        raise NotRepresentable("imaginary heads share the queries of others")
    if settings.scaling.untouched:
        raise NotRepresentable("scaling.first keeps the frequencies of the first positions")
    length = scheme.geometry.original_length
    frequencies, amplitude = scheme.frequencies(scheme.stretch(length))
    if not frequencies.any():  # DroPE
        return None
    beyond, beyond_amplitude = scheme.frequencies(scheme.stretch(4 * length))
    return RopeTable(
        theta=settings.theta,
        frequencies=tuple(frequencies.tolist()),
        amplitude=amplitude,
        layout=settings.layout,
        beyond=(tuple(beyond.tolist()), beyond_amplitude),
        native=_native(scheme),
    )


def _native(scheme: Rope) -> dict[str, Any] | None:
    settings = scheme.settings
    scaling = settings.scaling
    rope_type = TYPES.get(scaling.name)
    given = scaling.model_dump(exclude={"name", "ramp", "first"}, exclude_none=True)
    if given.get("factor") == "auto":
        given["factor"] = 1.0
    if rope_type == "longrope":
        given.setdefault("short_factor", [1.0] * (scheme.dims // 2))
    if rope_type in REFERS_TO_LENGTH:
        given["original_max_position_embeddings"] = scheme.geometry.original_length
    if isinstance(settings, PRopeSettings):
        rope_type = "proportional"
        given["partial_rotary_factor"] = settings.share
    return None if rope_type is None else {"rope_type": rope_type, **given}


@dataclass(frozen=True)
class DescribedModel:
    """A model without its weights.

    Attributes:
        kinds: the settings of each layer.
        tables: the rotation of each layer; None without positions.
    """

    shape: ImportedShape
    kinds: list[LayerKind]
    tables: list[RopeTable | None]

    @classmethod
    def of_model(cls, model: Transformer) -> DescribedModel:
        """Describe a model. Raises NotRepresentable if a scheme has positions that are not
        rotations."""
        sizes = (model.vocab_size, model.train_length, model.original_length)
        return cls.of_shape(ImportedShape(None, model.settings, *sizes), model.position)

    @classmethod
    def of_shape(
        cls, shape: ImportedShape, schemes: Mapping[str, PositionalScheme] | None = None
    ) -> DescribedModel:
        """Describe the model of a shape. `schemes`: schemes of the layer kinds; None: create new
        schemes."""
        settings = shape.model
        kinds = settings.resolved_kinds
        tables = {}
        for name, kind in kinds.items():
            scheme_class = SCHEMES[kind.position.name][1]
            if not issubclass(scheme_class, NoPE | Rope | LearnedRope):
                raise NotRepresentable("positions other than rotations by fixed frequencies")
            if kind.position.per_layer:
                raise NotRepresentable("frequencies of its own in each layer")
            geometry = kind.geometry(shape.train_length, shape.original)
            scheme = schemes[name] if schemes else scheme_class(kind.position, geometry)
            tables[name] = rope_table(scheme)
        names = settings.layer_kinds
        return cls(shape, [kinds[name] for name in names], [tables[name] for name in names])

    def differences(self, theirs: DescribedModel) -> list[str]:
        """The settings in which the computation of `theirs`, a model of a class, differs.
        Differences that weights absorb do not count: constant factors on q·k, the order of rotated
        features, sinks and factors of layers that this model does not have."""
        expected = theirs._facts()
        names = set()
        for (layer, name), value in self._facts().items():
            other = expected.get((layer, name))
            if not _equal(value, other) and (name, other) not in ABSORBED:
                names.add(name)
        return sorted(names)

    def _facts(self) -> dict[tuple[int, str], Any]:
        """The values that determine the computation besides weights, by (layer, name); layer -1:
        values of all layers."""
        facts = {(-1, key): getattr(self.shape.model, key) for key in SHARED}
        for i, kind in enumerate(self.kinds):
            mixer = MIXERS[kind.mixer.name][1]
            keys = LAYER - (set() if mixer.has_queries else HEADS)
            keys -= set() if kind.mixer.name == "attention" else PROJECTION
            facts |= {(i, key): getattr(kind, key) for key in keys}
            facts[i, "mixer"] = kind.mixer.name
            facts |= {(i, f"mixer.{key}"): x for key, x in resolved_mixer(kind).items()}
            if mixer.has_queries:
                table = self.tables[i]
                facts[i, "position"] = None if table is None else table.rotation
            if mixer.has_attention_weights:
                position = kind.position
                facts |= {(i, key): getattr(position, key) for key in MODIFIERS}
                facts[i, "temperature"] = self._temperature(kind)
        return facts

    def _temperature(self, kind: LayerKind) -> Any:
        """The temperature, or None for a factor that the projection of queries absorbs."""
        temperature = kind.position.temperature
        if isinstance(temperature, Ministral3Temperature):
            return temperature.beta, temperature.length or self.shape.original
        has_norm = kind.mixer.name == "attention" and bool(kind.qk_norm)
        by_head = isinstance(temperature, HeadTemperature) or temperature.by_head is not None
        is_constant = isinstance(temperature, NoTemperature | FixedTemperature | HeadTemperature)
        return None if is_constant and not (by_head and has_norm) else temperature.name


@dataclass(frozen=True)
class ClassChoice:
    """The class that represents a model.

    Attributes:
        model_type: None for a generated modeling file.
        reason: why the model requires a generated file.
        config: entries of config.json that describe the model.
        ours: the model to export.
        theirs: the model that the config describes; constant factors on q·k and the order of
            rotated features may differ.
    """

    model_type: str | None
    reason: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    ours: DescribedModel | None = None
    theirs: DescribedModel | None = None


def resolved_mixer(kind: LayerKind) -> dict[str, Any]:
    """The settings of a mixer that change its result, including defaults that depend on other
    settings."""
    mixer = kind.mixer
    derived = {
        "value_dim": getattr(mixer, "unrotated_dim", kind.head_dim),
        "scale": kind.head_dim**-0.5,
        "norm_eps": kind.norm_eps,
        "output_norm_eps": kind.norm_eps,
    }
    return {
        key: derived.get(key) if value is None else value
        for key, value in mixer.model_dump(exclude={"name", "chunk"}).items()
    }


def _equal(a: Any, b: Any) -> bool:
    """Equality up to the rounding of floats."""
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-20)  # STILL pairs differ from 0
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_equal(*pair) for pair in zip(a, b, strict=True))
    return a == b
