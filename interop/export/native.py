"""config.json and weights of a model in a class of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from interop.export.classes import ClassChoice
from interop.export.exported_rope import RopeTable
from interop.huggingface.config import FULL, SLIDING
from interop.huggingface.families import FAMILIES
from interop.huggingface.weight_names import joined, to_half
from model import Transformer
from model.position.temperature import Ministral3Temperature

# logit of a sink without weight; finite in every dtype but float16, where it is −inf
NO_SINK = -1e9


def config(model: Transformer, choice: ClassChoice) -> dict[str, Any]:
    """The entries of config.json that describe the model."""
    s = model.settings
    model_type = choice.model_type
    assert model_type is not None
    entries: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": s.dim,
        "intermediate_size": s.ffn_dim,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.train_length,
        "rms_norm_eps": s.norm_eps,
        "tie_word_embeddings": s.tie_embeddings,
        "rope_parameters": _rope_parameters(model, choice),
    }
    if "attention_bias" in FAMILIES[model_type].defaults:
        entries["attention_bias"] = s.attention_bias == "all"
    if "mlp_bias" in FAMILIES[model_type].defaults:
        entries["mlp_bias"] = s.mlp_bias
    if model_type == "phi3":
        entries["original_max_position_embeddings"] = model.original_length
    if model_type in ("granite", "granite_swa"):
        entries |= {
            "embedding_multiplier": s.embedding_multiplier,
            "residual_multiplier": s.residual_multiplier,
            "attention_multiplier": model.kinds[s.layer_kinds[0]].attention_scale,
            "logits_scaling": s.logit_divisor,
        }
    if model_type == "gemma3_text":
        entries |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": _query_scalar(model),
            "final_logit_softcapping": s.logit_softcap,
        }
    return entries | _layers(model, choice)


def _query_scalar(model: Transformer) -> int:
    """Gemma 3's `query_pre_attn_scalar`, an integer: that of the model's scale of q·k, or the head
    dimension."""
    s = model.settings
    scalar = model.kinds[s.layer_kinds[0]].attention_scale ** -2
    return round(scalar) if abs(round(scalar) - scalar) < 1e-9 * scalar else s.head_dim


def _rope_parameters(model: Transformer, choice: ClassChoice) -> dict[str, Any]:
    if choice.model_type in ("olmo3", "gemma3_text"):
        # They read nothing but the nested form, and `truncate` beside it.
        kinds = zip(model.settings.layer_kinds, choice.tables, strict=True)
        windowed = [(model.kinds[kind].position.window is not None, table) for kind, table in kinds]
        by_type: dict[str, Any] = {}
        for name, is_windowed in ((FULL, False), (SLIDING, True)):
            of_type = [
                table for windows, table in windowed if windows == is_windowed
            ] or choice.tables
            by_type[name] = _rotary_settings(model, choice, of_type)
        truncated = [
            of_type.pop("truncate") for of_type in by_type.values() if "truncate" in of_type
        ]
        return by_type | ({"truncate": truncated[0]} if truncated else {})
    return _rotary_settings(model, choice, choice.tables)


def _rotary_settings(
    model: Transformer, choice: ClassChoice, tables: Sequence[RopeTable | None]
) -> dict[str, Any]:
    """The rotary settings of these layers, read from the first layer that has positions."""
    s = model.settings
    table = next((table for table in tables if table is not None), None)
    if table is None:
        return {"rope_type": "default", "rope_theta": 10_000.0}
    parameters = table.parameters(model.original_length, native=choice.model_type != "phi3")
    if choice.model_type == "phi3":
        # Half a feature more, so that rounding cannot lose a pair.
        dims = 2 * len(table.frequencies)
        share = dims / s.head_dim
        parameters["partial_rotary_factor"] = (
            share if int(s.head_dim * share) == dims else (dims + 0.5) / s.head_dim
        )
    temperature = model.kinds[s.layer_kinds[0]].position.temperature
    if isinstance(temperature, Ministral3Temperature):
        parameters |= {
            "llama_4_scaling_beta": temperature.beta,
            "original_max_position_embeddings": temperature.length or model.original_length,
        }
    return parameters


def _layers(model: Transformer, choice: ClassChoice) -> dict[str, Any]:
    """Windows, layers without positions, and bases of each layer."""
    s = model.settings
    model_type = choice.model_type
    windows = [model.kinds[kind].position.window for kind in s.layer_kinds]
    window = next((w for w in windows if w), None)
    types = [SLIDING if w else FULL for w in windows]
    if model_type in ("mistral", "ministral3", "phi3"):
        return {"sliding_window": window}
    entries: dict[str, Any] = {}
    if model_type in ("qwen2", "qwen3", "smollm3"):
        entries = {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": types,
        }
    if model_type == "smollm3":
        entries["no_rope_layers"] = [int(table is not None) for table in choice.tables]
    if model_type in ("granite_swa", "olmo3", "gemma3_text"):
        entries = {"sliding_window": window or model.train_length, "layer_types": types}
    if model_type == "granite_swa":
        entries["layer_rope_theta"] = [table.theta if table else 0 for table in choice.tables]
    return entries


def weights(
    model: Transformer,
    state: dict[str, Tensor],
    choice: ClassChoice,
) -> dict[str, Tensor]:
    """The weights by their names in transformers, with factors folded in and rows of queries and
    keys in the layout of transformers."""
    s = model.settings
    assert choice.model_type is not None
    family = FAMILIES[choice.model_type]
    ours = {name: weight for name, weight in state.items() if not name.startswith("position.")}
    if s.width_ratio != 1:
        ours["norm.weight"] = ours["norm.weight"] / s.width_ratio
    for i, (kind, table) in enumerate(zip(s.layer_kinds, choice.tables, strict=True)):
        prefix = f"layers.{i}.attention."
        scale = ours.pop(f"{prefix}position.scale", None)
        _fold(
            ours,
            prefix,
            model,
            kind,
            scale,
            _own_scale(model, kind, choice.model_type),
        )
        if table is not None and table.layout == "interleaved":
            _to_half(ours, prefix, model, table)
        if choice.model_type == "granite_swa" and f"{prefix}position.sink" not in ours:
            value = 0.0 if model.kinds[kind].position.sink_logit == "zero" else NO_SINK
            ours[f"{prefix}position.sink"] = ours["norm.weight"].new_full((s.heads,), value)
    theirs, left = family.weight_map(s, ours)
    assert not left, f"{choice.model_type} has no {left}"
    return {
        name: joined(name, [ours[part] for part in parts], s.heads, family.one_plus_norms)
        for name, parts in theirs.items()
    }


def _own_scale(model: Transformer, kind: str, model_type: str) -> float:
    """The factor on q·k of a class of transformers."""
    if "granite" in model_type:
        return model.kinds[kind].attention_scale
    if model_type == "gemma3_text":
        return _query_scalar(model) ** -0.5
    return model.settings.head_dim**-0.5


def _fold(
    ours: dict[str, Tensor],
    prefix: str,
    model: Transformer,
    kind: str,
    scale: Tensor | None,
    own_scale: float,
) -> None:
    """Multiply what computes the queries by the layer's constant factors on q·k."""
    s = model.settings
    temperature = model.kinds[kind].position.temperature
    ratio = model.kinds[kind].attention_scale / own_scale
    factor = torch.full((s.heads,), ratio, dtype=torch.float64)
    if scale is not None:
        factor *= scale.cpu().double()
    elif temperature.by_head is not None:
        factor *= torch.tensor(temperature.by_head, dtype=torch.float64)
    elif temperature.name == "fixed":
        factor *= temperature.value
    if (factor - 1).abs().max() < 1e-12:
        return
    names = [f"{prefix}q_norm.weight"]
    if s.qk_norm:
        factor = factor[:1]
    else:
        names = [name for name in (f"{prefix}wq.weight", f"{prefix}wq.bias") if name in ours]
    for name in names:
        weight = ours[name]
        rows = factor.repeat_interleave(weight.shape[0] // len(factor))
        ours[name] = (weight.double() * rows.view(-1, *[1] * (weight.ndim - 1))).to(weight.dtype)


def _to_half(
    ours: dict[str, Tensor],
    prefix: str,
    model: Transformer,
    table: RopeTable,
) -> None:
    s = model.settings
    rotated = 2 * len(table.frequencies)
    for letter, heads in (("q", s.heads), ("k", s.kv_heads)):
        for name, count in (
            (f"{prefix}w{letter}.weight", heads),
            (f"{prefix}w{letter}.bias", heads),
            (f"{prefix}{letter}_norm.weight", 1 if s.qk_norm is True else heads),
        ):
            if name in ours:
                ours[name] = to_half(ours[name], count, rotated)
