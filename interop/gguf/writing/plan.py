"""How a model is represented in a GGUF file: which architecture of llama.cpp computes the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from errors import InteropError
from interop.gguf.reading.config import NO_WINDOW, SMOLLM3_STEP
from model import ModelSettings, Transformer
from model.position import PositionalScheme, PositionSettings
from model.position.remap import NoRemap
from model.position.scaling import LinearScaling, LongRoPEScaling, YaRNScaling, plain_frequencies
from model.position.schemes.alibi import AlibiSettings, alibi_slopes
from model.position.schemes.learned_rope import LearnedRope
from model.position.schemes.rope import Rope
from model.position.temperature import (
    FixedTemperature,
    HeadTemperature,
    Ministral3Temperature,
    NoTemperature,
)

NO_ROTATION = 1e30  # divisor of the frequency of features that are not rotated


@dataclass(frozen=True)
class Rotation:
    """Rotary positions with fixed frequencies.

    Attributes:
        frequencies: radians per token of each pair of rotated features.
        amplitude: factor on cos and sin.
        theta: base of the frequencies before scaling.
        layout: `half` or `interleaved`.
        metadata: `rope.scaling.*` keys that describe the frequencies, if there are any.
    """

    frequencies: tuple[float, ...]
    amplitude: float
    theta: float
    layout: str
    metadata: dict[str, Any] | None = field(compare=False)


@dataclass(frozen=True)
class LayerPlan:
    """What attention does in one layer, apart from factors that are folded into weights.

    Attributes:
        temperature: β and L0 of Ministral 3's temperature, or None.
    """

    rotation: Rotation | None
    window: int | None
    has_sink: bool
    is_alibi: bool
    temperature: tuple[float, int] | None


@dataclass(frozen=True)
class Plan:
    """The representation of a model.

    Attributes:
        architecture: `general.architecture`.
        metadata: keys without the prefix of the architecture.
        divisors: divisors of the frequencies, or None.
        rotated: number of rotated features at the start of each head; their rows are reordered.
        layout: layout of the rotated features in the file.
        folds_scales: whether the architecture has no multipliers, so that they are folded into weights.
    """

    architecture: str
    metadata: dict[str, Any]
    divisors: Tensor | None
    rotated: int
    layout: str
    folds_scales: bool


def refusal(setting: str, what: str) -> InteropError:
    """The error for a model that no architecture of llama.cpp computes."""
    return InteropError(
        f"{setting}: llama.cpp has no architecture that computes {what}; export to the Hugging Face format"
    )


def make_plan(model: Transformer) -> Plan:
    """Choose the architecture and its metadata.

    Raises:
        InteropError: llama.cpp has no architecture that computes this model; the message names the setting.
    """
    s = model.settings
    _check_decoder(s)
    layers = _layers(model)
    rotation = _single("frequencies", [layer.rotation for layer in layers])
    window = _single("windows", [layer.window for layer in layers])
    needs = _needs(s, layers, rotation)
    architecture = _architecture(s, needs)
    folds_scales = architecture not in _GRANITES
    metadata = _sizes(model) | ({} if folds_scales else multipliers(s))
    if architecture == "refact":
        return Plan(architecture, metadata, None, 0, "half", folds_scales)
    if architecture == "granite_swa":
        # llama.cpp requires a layer with a window.
        metadata["attention.sliding_window"] = window or NO_WINDOW
        metadata["attention.sliding_window_pattern"] = [
            window in (layer.window, None) for layer in layers
        ]
        metadata["attention.rope_pattern"] = [layer.rotation is not None for layer in layers]
    if layers[0].temperature is not None:
        beta, length = layers[0].temperature
        metadata |= {
            "attention.temperature_scale": beta,
            "rope.scaling.original_context_length": length,
        }
    rotated = 2 * len(rotation.frequencies) if rotation else 0
    dimensions = rotated if architecture == "phi3" else s.head_dim
    metadata["rope.dimension_count"] = dimensions
    metadata["rope.freq_base"] = rotation.theta if rotation else 10_000.0
    layout = "half" if architecture in ("qwen2", "qwen3", "phi3") else "interleaved"
    # The original length of mistral3 is that of its temperature.
    described = rotated == dimensions and architecture != "mistral3"
    if rotation is not None and rotation.metadata is not None and described:
        return Plan(architecture, metadata | rotation.metadata, None, rotated, layout, folds_scales)
    metadata["rope.scaling.type"] = "longrope" if architecture == "phi3" else "none"
    metadata["rope.scaling.attn_factor"] = rotation.amplitude if rotation else 1.0
    return Plan(
        architecture, metadata, _divisors(rotation, dimensions), rotated, layout, folds_scales
    )


# What a model may need, and the architectures that compute it, the most widely supported first.
TABLE = "a table of frequencies"
PARTIAL = "partial rotation"
NOPE = "no positions"
SOME_NOPE = "layers without positions"
EVERY_FOURTH = "no positions in every fourth layer"
ALIBI = "ALiBi"
WINDOW = "windows"
SINK = "sink logits"
TEMPERATURE = "a temperature by position"
QK_NORM = "QK-norm"
QKV_BIAS = "biases of queries, keys and values"
BIASES = "biases of all projections"
MULTIPLIERS = "multipliers"
_LLAMA = {TABLE, PARTIAL, NOPE, QKV_BIAS, BIASES}
CAPABILITIES = {
    "phi3": {PARTIAL, TABLE},
    "qwen2": {QKV_BIAS},
    "llama": _LLAMA,
    "smollm3": {EVERY_FOURTH},
    "refact": {ALIBI},
    "qwen3": {QK_NORM, QKV_BIAS},
    "mistral3": {TEMPERATURE, TABLE, PARTIAL, QKV_BIAS, BIASES},
    "granite": {MULTIPLIERS, *_LLAMA},
    "granite_swa": {MULTIPLIERS, WINDOW, SINK, SOME_NOPE, EVERY_FOURTH, *_LLAMA},
}
_GRANITES = ("granite", "granite_swa")
# they require heads · head_dim = dim; else Llama can do it
_ONLY_FOR = {"phi3": PARTIAL, "qwen2": QKV_BIAS}


def _check_decoder(s: ModelSettings) -> None:
    if s.mixer.name != "attention":
        raise refusal(
            f"model.mixer.name = {s.mixer.name}", "linear attention with these feature maps"
        )
    if s.logit_softcap is not None:
        raise refusal("model.logit_softcap", "a cap on the logits of a Llama")
    if s.norm_placement != "input" or s.qk_norm == "all_heads":
        raise refusal(
            "model.norm_placement, model.qk_norm", "norms of outputs or of all heads together"
        )
    if s.head_dim % 2:
        raise refusal(f"model.head_dim = {s.head_dim}", "an odd head dimension")


def _layers(model: Transformer) -> list[LayerPlan]:
    by_kind: dict[str, LayerPlan] = {}
    for name, scheme in model.schemes.items():
        kind = name if name in model.settings.kinds else name.rsplit("-", 1)[0]
        choice = model.settings.kinds[kind]
        where = f"model.position.kinds.{kind}" if model.settings.is_pattern else "model.position"
        by_kind[kind] = LayerPlan(
            rotation=_rotation(scheme, choice, where),
            window=choice.window,
            has_sink=choice.sink_logit != "none",
            is_alibi=isinstance(choice, AlibiSettings),
            temperature=_temperature(scheme, choice, where),
        )
        if choice.sinks:
            raise refusal(f"{where}.sinks", "a window with visible first tokens")
    return [by_kind[kind] for kind in model.settings.layer_kinds]


def _temperature(
    scheme: PositionalScheme, choice: PositionSettings, where: str
) -> tuple[float, int] | None:
    given = choice.temperature
    if isinstance(given, Ministral3Temperature):
        return given.beta, given.length or scheme.geometry.original_length
    # these are folded in
    if not isinstance(given, NoTemperature | FixedTemperature | HeadTemperature):
        raise refusal(f"{where}.temperature.name = {given.name}", "this temperature")
    return None


def _rotation(scheme: PositionalScheme, choice: PositionSettings, where: str) -> Rotation | None:
    """The rotation of a layer kind; None without positions or with ALiBi."""
    if choice.name == "none":
        return None
    if isinstance(choice, AlibiSettings):
        _check_alibi(choice, scheme.geometry.heads, where)
        return None
    if isinstance(scheme, LearnedRope):
        if scheme.settings.share != "model":
            raise refusal(
                f"{where}.share = {scheme.settings.share}", "frequencies that differ between layers"
            )
        frequencies = tuple(scheme.frequencies().detach().cpu().double().tolist())
        return Rotation(frequencies, 1.0, scheme.settings.theta, scheme.settings.layout, None)
    if not isinstance(scheme, Rope):
        raise refusal(f"{where}.name = {choice.name}", f"{choice.name}")
    s = scheme.settings
    scaling = scheme.settings.scaling
    if not isinstance(s.remap, NoRemap):
        raise refusal(f"{where}.remap.name = {s.remap.name}", "remapped positions")
    if scaling.untouched:
        raise refusal(f"{where}.scaling.first", "first positions with other frequencies")
    fixed = not scaling.depends_on_length
    if isinstance(scaling, LongRoPEScaling):
        fixed = scaling.short_factor == scaling.long_factor and scaling.attention_factor is not None
    if not fixed:
        raise InteropError(
            f"{where}.scaling: the frequencies depend on the length of the text, but those of a GGUF file "
            "are fixed; set a number as scaling.factor"
        )
    found, amplitude = scheme.frequencies(scheme.stretch(scheme.geometry.train_length))
    if not found.any():  # DroPE
        return None
    return Rotation(
        tuple(found.tolist()), float(amplitude), s.theta, s.layout, _described(scheme, amplitude)
    )


def _check_alibi(choice: AlibiSettings, heads: int, where: str) -> None:
    slopes = alibi_slopes(heads)
    given = slopes if choice.slopes is None else torch.tensor(choice.slopes, dtype=torch.float64)
    if choice.learned or not torch.allclose(given, slopes, rtol=1e-6, atol=0):
        raise refusal(f"{where}.slopes", "ALiBi with other slopes than the geometric ones")
    if choice.stretch != 1:
        raise refusal(f"{where}.stretch", "interpolated ALiBi")


def _described(scheme: Rope, amplitude: float) -> dict[str, Any] | None:
    """The frequencies as metadata, which llama.cpp and other readers of GGUF files understand directly."""
    s = scheme.settings
    scaling = scheme.settings.scaling
    if s.resonance or s.name != "rope":
        return None
    if scaling.name == "none":
        return {}
    if isinstance(scaling, LinearScaling):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    # llama.cpp reads other values of beta in few architectures only.
    if isinstance(scaling, YaRNScaling) and (scaling.beta_fast, scaling.beta_slow) == (32, 1):
        factor = float(scaling.factor)
        whole = scaling.ramp == "dim" and scaling.truncate
        if not whole or factor <= 1:
            return None
        found: dict[str, Any] = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": scheme.geometry.original_length,
        }
        times = amplitude / (0.1 * math.log(factor) + 1)
        return (
            found
            if math.isclose(times, 1, rel_tol=1e-12)
            else found | {"rope.scaling.attn_factor": times}
        )
    return None


def _single(what: str, values: list) -> Any:
    """The only value other than None."""
    found = [value for value in dict.fromkeys(values) if value is not None]
    if len(found) > 1:
        raise refusal("model.position", f"layers with different {what}")
    return found[0] if found else None


def _needs(s: ModelSettings, layers: list[LayerPlan], rotation: Rotation | None) -> set[str]:
    """What the architecture must have, apart from a Llama with plain frequencies."""
    rotated = [layer.rotation is not None for layer in layers]
    alibi = [layer.is_alibi for layer in layers]
    partial = rotation is not None and 2 * len(rotation.frequencies) < s.head_dim
    found = {
        ALIBI: any(alibi),
        QK_NORM: bool(s.qk_norm),
        WINDOW: any(layer.window is not None for layer in layers),
        SINK: any(layer.has_sink for layer in layers),
        TEMPERATURE: any(layer.temperature is not None for layer in layers),
        PARTIAL: partial,
        TABLE: rotation is not None and rotation.metadata is None,
        NOPE: not any(rotated) and not any(alibi),
        QKV_BIAS: s.attention_bias == "qkv",
        BIASES: s.attention_bias == "all" or s.mlp_bias,
    }
    if len(set(rotated)) == 2:
        pattern = [(i + 1) % SMOLLM3_STEP != 0 for i in range(len(layers))]
        found[EVERY_FOURTH if rotated == pattern else SOME_NOPE] = True
    for what, values in ((ALIBI, alibi), (TEMPERATURE, [layer.temperature for layer in layers])):
        if len(set(values)) > 1:
            raise refusal("model.position", f"{what} in some layers only")
    return {what for what, needed in found.items() if needed}


def _architecture(s: ModelSettings, needs: set[str]) -> str:
    # Multipliers are folded into the weights where no architecture has them.
    multiplied = {MULTIPLIERS} if is_multiplied(s) else set()
    is_square = s.heads * s.head_dim == s.dim
    for wanted in (needs | multiplied, needs):
        for architecture, can in CAPABILITIES.items():
            if architecture in _ONLY_FOR and not (_ONLY_FOR[architecture] in needs and is_square):
                continue
            if wanted <= can:
                return architecture
    raise refusal("model", " and ".join(sorted(needs)))


def _divisors(rotation: Rotation | None, dimensions: int) -> Tensor:
    """(dimensions / 2,) what the frequencies theta^(−2k/dimensions) are divided by."""
    divisors = torch.full((dimensions // 2,), NO_ROTATION, dtype=torch.float64)
    if rotation is not None:
        plain = plain_frequencies(rotation.theta, dimensions)
        for k, frequency in enumerate(rotation.frequencies):
            if frequency:
                divisors[k] = plain[k] / frequency
    return divisors.float()


def _sizes(model: Transformer) -> dict[str, Any]:
    s = model.settings
    return {
        "vocab_size": model.vocab_size,
        "context_length": model.train_length,
        "embedding_length": s.dim,
        "block_count": s.layers,
        "feed_forward_length": s.ffn_dim,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.norm_eps,
    }


def multipliers(s: ModelSettings) -> dict[str, float]:
    """Factors that Granite has and Llama has not, by their keys in a GGUF file."""
    return {
        "attention.scale": s.attention_scale,
        "embedding_scale": s.embedding_multiplier,
        "residual_scale": s.residual_multiplier,
        "logit_scale": s.logit_divisor * s.width_ratio,
    }


def is_multiplied(s: ModelSettings) -> bool:
    """Whether any of them differs from a Llama's."""
    neutral = {"attention.scale": s.head_dim**-0.5}
    return any(value != neutral.get(key, 1.0) for key, value in multipliers(s).items())
