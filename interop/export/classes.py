"""Which class of transformers represents a model exactly, and why none does.

A model has requirements, such as a window in some layers; a class qualifies if it supports them
all. Models without such a class are exported with a generated modeling file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interop.export.exported_rope import RopeTable, rope_table
from model import ModelSettings, Transformer
from model.position import PositionSettings
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


class NotRepresentable(Exception):
    """No class of transformers has this part of a model; the message is the reason."""


# Requirements, as they are named in messages.
SCALED = "frequencies other than those of a base"
PARTIAL = "partial rotation"
NOPE = "layers without positions"
WINDOW = "a window"
WINDOWS = "windows in some layers"
BASES = "several rotary bases"
BY_TYPE = "frequencies of layers with windows and of others"
SINK = "sink logits"
TEMPERATURE = "Ministral 3's temperature"
QK_NORM = "QK-norm"
JOINT_NORM = "norms of outputs and of all heads together"
QKV_BIAS = "biases of q, k and v"
ALL_BIASES = "biases of all attention projections"
MLP_BIAS = "MLP biases"
MULTIPLIERS = "Granite's multipliers"
GEMMA = "Gemma 3's blocks"
UNEVEN = "a width that is not a multiple of the heads"  # refused by LlamaConfig alone

# Of each model_type, in the order of preference: what it supports, and what it requires.
CLASSES: dict[str, tuple[set[str], set[str]]] = {
    "llama": ({SCALED, ALL_BIASES, MLP_BIAS}, set()),
    "mistral": ({SCALED, WINDOW, UNEVEN}, set()),
    "qwen3": ({SCALED, WINDOW, WINDOWS, ALL_BIASES, UNEVEN}, {QK_NORM}),
    "qwen2": ({SCALED, WINDOW, WINDOWS, UNEVEN}, {QKV_BIAS}),
    "phi3": ({SCALED, WINDOW, UNEVEN}, {PARTIAL}),
    "smollm3": ({SCALED, WINDOW, WINDOWS, NOPE, ALL_BIASES, MLP_BIAS, UNEVEN}, set()),
    "ministral3": ({SCALED, WINDOW, UNEVEN}, {TEMPERATURE}),
    "granite": ({SCALED, ALL_BIASES, MLP_BIAS, UNEVEN}, {MULTIPLIERS}),
    "granite_swa": (
        {SCALED, WINDOW, WINDOWS, NOPE, BASES, SINK, MULTIPLIERS, ALL_BIASES, MLP_BIAS, UNEVEN},
        set(),
    ),
    "olmo2": ({SCALED, ALL_BIASES, UNEVEN}, {JOINT_NORM}),
    "olmo3": ({SCALED, ALL_BIASES, WINDOW, WINDOWS, BY_TYPE, UNEVEN}, {JOINT_NORM}),
    "gemma3_text": ({SCALED, ALL_BIASES, WINDOW, WINDOWS, BY_TYPE}, {GEMMA}),
}


@dataclass(frozen=True)
class ClassChoice:
    """The class that represents a model.

    Attributes:
        model_type: None for a generated modeling file.
        reason: the requirements that it meets, or what no class has.
        tables: the rotation of each layer; None without positions. Empty for a generated file.
    """

    model_type: str | None
    reason: str
    tables: tuple[RopeTable | None, ...] = ()


def choose_class(model: Transformer) -> ClassChoice:
    """The class of transformers that represents a model exactly."""
    try:
        tables = tuple(_table(model, kind) for kind in model.settings.layer_kinds)
        needed = _requirements(model, tables)
    except NotRepresentable as reason:
        return ClassChoice(None, str(reason))
    for model_type, (supported, required) in CLASSES.items():
        if required <= needed <= supported | required:
            reason = ", ".join(sorted(needed)) or "a plain Llama"
            return ClassChoice(model_type, reason, tables)
    return ClassChoice(None, f"no class combines {', '.join(sorted(needed))}")


def _table(model: Transformer, kind: str) -> RopeTable | None:
    choice = model.kinds[kind].position
    kind_of_scheme = SCHEME_KINDS.get(choice.name, "is in no class of transformers")
    if kind_of_scheme == NO_POSITIONS:
        return None
    if kind_of_scheme != FREQUENCIES:
        raise NotRepresentable(f"{choice.name} {kind_of_scheme}")
    if choice.per_layer:
        raise NotRepresentable(f"{choice.name} has frequencies of its own in each layer")
    table = rope_table(model.schemes[kind])
    if isinstance(table, str):
        raise NotRepresentable(table)
    return table if any(table.frequencies) else None


def _requirements(model: Transformer, tables: tuple[RopeTable | None, ...]) -> set[str]:
    s = model.settings
    for kind in model.kinds.values():
        if kind.mixer.name != "attention":
            raise NotRepresentable(kind.mixer.describe() + " with positions")
        if kind.gate != "none":
            raise NotRepresentable("a gate of attention's output")
        if (kind.heads, kind.kv_heads, kind.head_dim) != (s.heads, s.kv_heads, s.head_dim):
            raise NotRepresentable("layers with different heads")
    kinds = [model.kinds[kind].position for kind in s.layer_kinds]
    is_gemma = _is_gemma(s)
    if s.logit_softcap is not None and not is_gemma:
        raise NotRepresentable("a softcap of the output logits")
    for choice in kinds:
        if choice.sinks:
            raise NotRepresentable("sink tokens outside the window")
        if choice.weights != "softmax" or choice.shifted_keys:
            raise NotRepresentable("entmax" if choice.weights != "softmax" else "shifted keys")
    needed = {_temperature(choice, bool(s.qk_norm)) for choice in kinds}
    if len(needed) > 1:
        raise NotRepresentable("temperatures in some layers")
    rotations = [table for table in tables if table is not None]
    windows = [choice.window for choice in kinds]
    if len({window for window in windows if window}) > 1:
        raise NotRepresentable("windows of several sizes")
    has_joint_norm = s.qk_norm == "all_heads" and s.norm_placement == "output"
    several = _several_tables(tables, windows, has_joint_norm or is_gemma)
    is_partial = any(2 * len(table.frequencies) < s.head_dim for table in rotations)
    if (
        is_partial
        and s.head_dim != s.dim // s.heads
        and any(table.is_scaled for table in rotations)
    ):
        raise NotRepresentable(
            "scaled partial rotation of heads of another size than width / heads"
        )
    met = {
        SCALED: any(table.is_scaled for table in rotations),
        PARTIAL: is_partial,
        NOPE: len(rotations) < len(tables),
        WINDOW: all(windows),
        WINDOWS: any(windows) and not all(windows),
        SINK: any(choice.sink_logit != "none" for choice in kinds),
        GEMMA: is_gemma,
        QK_NORM: s.qk_norm is True and s.norm_placement == "input",
        JOINT_NORM: has_joint_norm,
        QKV_BIAS: s.attention_bias == "qkv",
        ALL_BIASES: s.attention_bias == "all",
        MLP_BIAS: s.mlp_bias,
        UNEVEN: s.dim % s.heads != 0,
        MULTIPLIERS: not is_gemma
        and (
            s.attention_multiplier is not None
            or any(x != 1 for x in (s.embedding_multiplier, s.residual_multiplier, s.logit_divisor))
        ),
    }
    if not is_gemma and (s.norm_placement == "both" or s.activation != "silu"):
        raise NotRepresentable(
            f"{s.activation} with norms of {s.norm_placement} and qk_norm {s.qk_norm}"
        )
    if not is_gemma and (bool(s.qk_norm), s.norm_placement == "output") not in (
        (False, False),
        (met[QK_NORM], False),
        (met[JOINT_NORM], True),
    ):
        raise NotRepresentable(f"qk_norm {s.qk_norm} with norms of the {s.norm_placement}")
    return {name for name, is_met in met.items() if is_met} | ((needed | {several}) - {""})


def _is_gemma(s: ModelSettings) -> bool:
    """Whether blocks have the norms, activation and multipliers of Gemma 3."""
    return (
        s.norm_placement == "both"
        and s.qk_norm is True
        and s.activation == "gelu_tanh"
        and (s.embedding_multiplier, s.residual_multiplier, s.logit_divisor)
        == (s.dim**0.5, 1.0, 1.0)
    )


def _several_tables(
    tables: Sequence[RopeTable | None], windows: Sequence[int | None], can_differ_by_type: bool
) -> str:
    """BASES, or BY_TYPE, which OLMo 3 and Gemma 3 have, or "" if all layers with positions rotate
    alike."""
    by_window: dict[bool, list[tuple]] = {False: [], True: []}
    for table, window in zip(tables, windows, strict=True):
        if table is not None:
            by_window[window is not None].append(
                (table.theta, table.frequencies, table.amplitude, table.native)
            )
    every = by_window[False] + by_window[True]
    if all(rotation == every[0] for rotation in every):
        return ""
    if can_differ_by_type and all(
        rotation == of_type[0] for of_type in by_window.values() for rotation in of_type
    ):
        return BY_TYPE
    native = every[0][-1]
    if native is not None and all(rotation[-1] == native for rotation in every):
        return BASES
    raise NotRepresentable("several frequency tables")


def _temperature(choice: PositionSettings, has_norm: bool) -> str:
    """TEMPERATURE, or "" for a factor that the projection of queries absorbs."""
    temperature = choice.temperature
    if isinstance(temperature, Ministral3Temperature):
        return TEMPERATURE
    by_head = isinstance(temperature, HeadTemperature) or temperature.by_head is not None
    if isinstance(temperature, NoTemperature | FixedTemperature | HeadTemperature) and not (
        by_head and has_norm
    ):
        return ""
    raise NotRepresentable(f"temperature {temperature.name}" + (" with QK-norm" if by_head else ""))
