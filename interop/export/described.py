"""What a model computes, as far as its settings determine it, to compare models in classes of
transformers with ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from interop.export.exported_rope import RopeTable, rope_table
from interop.huggingface.config import ImportedShape
from model import SCHEMES, ModelSettings, Transformer
from model.mixers import MIXERS
from model.mixers.mixer import LayerKind
from model.position import PositionalScheme, PositionSettings
from model.position.schemes.absolute import NoPE
from model.position.schemes.learned_rope import LearnedRope
from model.position.schemes.rope import Rope
from model.position.temperature import (
    FixedTemperature,
    HeadTemperature,
    Ministral3Temperature,
    NoTemperature,
)

# Settings of each layer, of attention, and of mixers with queries.
LAYER = {field.name for field in fields(LayerKind)} - {"mixer", "position", "attention_scale"}
PROJECTION = {"gate", "qk_norm", "value_norm", "attention_bias"}
HEADS = {"heads", "kv_heads", "head_dim"}
MODIFIERS = set(PositionSettings.model_fields) - {"name", "temperature"}
# Settings of a class, with values, that do nothing with certain weights.
ABSORBED = {("layer_scale", True), ("sink_logit", "learned")}
# Settings of the model, without those of layers.
SHARED = set(ModelSettings.model_fields) - LAYER - {"mixer", "position", "attention_multiplier"}
SHARED -= {"mup", "pattern", "kinds"}


class NotRepresentable(Exception):
    """No class of transformers has this part of a model; the message is the reason."""


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
        """Raises NotRepresentable if a scheme is neither a rotation nor none."""
        sizes = (model.vocab_size, model.train_length, model.original_length)
        return cls.of_shape(ImportedShape(None, model.settings, *sizes), model.position)

    @classmethod
    def of_shape(
        cls, shape: ImportedShape, schemes: Mapping[str, PositionalScheme] | None = None
    ) -> DescribedModel:
        """`schemes`: those of the layer kinds; None: new ones."""
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
            table = None if isinstance(scheme, NoPE) else rope_table(scheme)
            if isinstance(table, str):
                raise NotRepresentable(table)
            tables[name] = table if table and any(table.frequencies) else None
        names = settings.layer_kinds
        return cls(shape, [kinds[name] for name in names], [tables[name] for name in names])

    def differences(self, theirs: DescribedModel) -> list[str]:
        """The settings in which a model of a class computes something else, up to what weights
        absorb: constant factors on q·k, the order of rotated features, sinks and factors of layers
        that this model does not have."""
        expected = theirs._facts()
        names = set()
        for (layer, name), value in self._facts().items():
            other = expected.get((layer, name))
            if not _equal(value, other) and (name, other) not in ABSORBED:
                names.add(name)
        return sorted(names)

    def _facts(self) -> dict[tuple[int, str], Any]:
        """What determines the computation besides weights, by layer; -1: of all layers."""
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
        reason: why it has one.
        config: entries of config.json that describe the model.
        ours: the model.
        theirs: the model that the config describes; constant factors on q·k and the order of
            rotated features may differ.
    """

    model_type: str | None
    reason: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    ours: DescribedModel | None = None
    theirs: DescribedModel | None = None


def resolved_mixer(kind: LayerKind) -> dict[str, Any]:
    """The settings of a mixer that change its result, with the defaults that depend on others."""
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
