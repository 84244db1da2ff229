"""What a model computes, as far as its settings determine it, to compare models in classes of
transformers with ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from interop.export.exported_rope import RopeTable, rope_table
from interop.huggingface.config import ImportedShape
from model import SCHEMES, ModelSettings, Transformer
from model.mixers.base import LayerKind
from model.mixers.registry import MIXERS
from model.position import PositionalScheme, PositionSettings
from model.position.temperature import (
    FixedTemperature,
    HeadTemperature,
    Ministral3Temperature,
    NoTemperature,
)

# What transformers' decoders with RMSNorm and SwiGLU can and cannot do with each scheme.
FREQUENCIES = "a rotation by fixed frequencies"
NO_POSITIONS = "no positions"
EMBEDDED = "adds positions to token embeddings"
BIASED = "adds a bias to the logits"
CONTENT = "computes positions from the layer input"
SCHEME_KINDS: dict[str, str] = {
    "none": NO_POSITIONS,
    **dict.fromkeys(("rope", "p_rope", "he_xu", "learned_rope"), FREQUENCIES),
    **dict.fromkeys(
        ("integer", "unit_interval", "binary", "sine", "sinusoidal", "learned"), EMBEDDED
    ),
    **dict.fromkeys(("alibi", "hard_alibi", "t5", "kerple", "sandwich", "fire"), BIASED),
    **dict.fromkeys(
        ("fox", "wall", "relative_logits", "path", "selective_rope", "carope"), CONTENT
    ),
    "xpos": "scales rotated queries and keys by position",
    "fope": "mixes frequencies in each head",
    "pope": "caches polar keys of twice the width",
    "hyperbolic": "decays features with distance",
    "cope": "counts positions by gates of query and key",
    "shaw": "adds vectors of the distance to the keys",
    "transformer_xl": "adds projected sinusoids of the distance to the logits",
    "dape": "adds a network of logits and biases",
    "stick_breaking": "replaces the softmax",
}
# Settings of a model that are alike in all layers.
SHARED = (
    "dim",
    "layers",
    "ffn_dim",
    "norm_eps",
    "tie_embeddings",
    "mlp_bias",
    "activation",
    "embedding_multiplier",
    "residual_multiplier",
    "layer_scale",
    "logit_divisor",
    "logit_softcap",
)


class NotRepresentable(Exception):
    """No class of transformers has this part of a model; the message is the reason."""


@dataclass(frozen=True)
class DescribedModel:
    """A model without its weights.

    Attributes:
        kinds: the settings of each layer.
        tables: the rotation of each layer; None without positions.
    """

    settings: ModelSettings
    kinds: list[LayerKind]
    tables: list[RopeTable | None]
    vocab_size: int
    train_length: int
    original_length: int

    @classmethod
    def of_model(cls, model: Transformer) -> DescribedModel:
        """Raises NotRepresentable if a scheme is neither a rotation nor none."""
        return cls._of(
            model.settings,
            model.schemes,
            model.vocab_size,
            model.train_length,
            model.original_length,
        )

    @classmethod
    def of_shape(cls, shape: ImportedShape) -> DescribedModel:
        original_length = shape.original_length or shape.train_length
        schemes = {
            name: SCHEMES[kind.position.name][1](
                kind.position, kind.geometry(shape.train_length, original_length)
            )
            for name, kind in shape.model.resolved_kinds.items()
        }
        return cls._of(shape.model, schemes, shape.vocab_size, shape.train_length, original_length)

    @classmethod
    def _of(
        cls, settings: ModelSettings, schemes: Mapping[str, PositionalScheme], *sizes: int
    ) -> DescribedModel:
        kinds = settings.resolved_kinds
        tables = {name: _table(kind.position, schemes, name) for name, kind in kinds.items()}
        return cls(
            settings,
            [kinds[name] for name in settings.layer_kinds],
            [tables[name] for name in settings.layer_kinds],
            *sizes,
        )

    def differences(self, theirs: DescribedModel) -> list[str]:
        """The settings in which a model of a class computes something else, up to what weights
        absorb: constant factors on q·k, the order of rotated features, sinks and factors of layers
        that this model does not have."""
        names = []
        for key in SHARED:
            is_added = key == "layer_scale" and theirs.settings.layer_scale
            if not is_added and not _equal(
                getattr(self.settings, key), getattr(theirs.settings, key)
            ):
                names.append(key)
        for i in range(min(len(self.kinds), len(theirs.kinds))):
            expected = dict(theirs._facts(i))
            for key, value in self._facts(i):
                is_added = key == "sink_logit" and expected.get(key) == "learned"
                if not is_added and not _equal(value, expected.get(key)):
                    names.append(key)
        return list(dict.fromkeys(names))

    def _facts(self, i: int) -> Iterator[tuple[str, Any]]:
        """What determines the computation of a layer."""
        kind = self.kinds[i]
        position = kind.position
        yield "mixer", kind.mixer.name
        yield "norm_placement", kind.norm_placement
        if kind.mixer.name != "attention":
            for key, value in resolved_mixer(kind).items():
                yield f"mixer.{key}", value
        else:
            for key in ("gate", "qk_norm", "value_norm", "attention_bias"):
                yield key, getattr(kind, key)
        mixer = MIXERS[kind.mixer.name][1]
        if mixer.has_queries:
            for key in ("heads", "kv_heads", "head_dim"):
                yield key, getattr(kind, key)
            table = self.tables[i]
            yield "position", None if table is None else table.rotation
        if mixer.has_attention_weights:
            for key in ("window", "sinks", "sink_logit"):
                yield key, getattr(position, key)
            yield "temperature", self._temperature(kind)

    def _temperature(self, kind: LayerKind) -> Any:
        """The temperature, or None for a factor that the projection of queries absorbs."""
        temperature = kind.position.temperature
        if isinstance(temperature, Ministral3Temperature):
            return temperature.beta, temperature.length or self.original_length
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


def _table(
    position: PositionSettings, schemes: Mapping[str, PositionalScheme], kind: str
) -> RopeTable | None:
    kind_of_scheme = SCHEME_KINDS.get(position.name, "is in no class of transformers")
    if kind_of_scheme == NO_POSITIONS:
        return None
    if kind_of_scheme != FREQUENCIES:
        raise NotRepresentable(f"{position.name} {kind_of_scheme}")
    if position.per_layer:
        raise NotRepresentable(f"{position.name} has frequencies of its own in each layer")
    table = rope_table(schemes[kind])
    if isinstance(table, str):
        raise NotRepresentable(table)
    return table if any(table.frequencies) else None
