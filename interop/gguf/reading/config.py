"""The metadata of a GGUF file as transformers' config.json."""

from __future__ import annotations

import math
from typing import Any

import torch

from errors import InteropError
from interop.gguf.architectures import (
    ARCHITECTURES,
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    Architecture,
)
from interop.gguf.reading.file import GGUFFile
from model.position.scaling import Llama3Scaling, plain_frequencies

NO_WINDOW = 1 << 20  # window of layers with full attention, in files that require a window
SMOLLM3_STEP = 4  # llama.cpp's smollm3 has no rotation in every fourth layer
# Keys that change what is computed and have no counterpart in the supported models.
_REFUSED = ("expert_count", "attention.clamp_kqv", "attention.value_residual", "logit_softcapping")


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of a file. Raises InteropError if it is not supported."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise InteropError(
            f"{file.path}: general.architecture = {file.architecture!r} cannot be imported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The content of the config.json that transformers would have for this file.

    Raises:
        InteropError: naming the metadata key that is missing, wrong or not supported.
    """
    architecture = architecture_of(file)
    a = file.architecture
    for key in _REFUSED:
        if file.get(f"{a}.{key}"):
            raise InteropError(
                f"{file.path}: {a}.{key} = {file.get(f'{a}.{key}')} cannot be imported"
            )
    heads = file.number(f"{a}.attention.head_count")
    dim = file.number(f"{a}.embedding_length")
    head_dim = file.number(f"{a}.attention.key_length", int, dim // heads)
    if file.number(f"{a}.attention.value_length", int, head_dim) != head_dim:
        raise InteropError(
            f"{file.path}: {a}.attention.value_length must equal {a}.attention.key_length"
        )
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": dim,
        "num_hidden_layers": file.number(f"{a}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.number(f"{a}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "intermediate_size": file.number(f"{a}.feed_forward_length"),
        "rms_norm_eps": file.number(f"{a}.attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": file.number(f"{a}.context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
    }
    if not architecture.alibi:
        config |= _rotary(file, config)
    config |= _OTHERS[a](file, config)
    return config


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding; `vocab_size` and the list of tokens may be shorter or absent."""
    rows = file.named("token_embd.weight").shape[0]
    said = file.number(f"{file.architecture}.vocab_size", int, rows)
    if said != rows:
        raise InteropError(
            f"{file.path}: token_embd.weight has {rows} rows, but {file.architecture}.vocab_size is {said}"
        )
    return rows


def _rotary(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    a = file.architecture
    head_dim = config["head_dim"]
    theta = file.number(f"{a}.rope.freq_base", float, 10_000.0)
    rotated = file.number(f"{a}.rope.dimension_count", int, head_dim)
    found: dict[str, Any] = {"rope_theta": theta}
    if rotated != head_dim:
        if a != "phi3":
            raise InteropError(
                f"{file.path}: {a}.rope.dimension_count is {rotated}, but the head dimension is {head_dim}; "
                f"llama.cpp does not load such a file of architecture {a}"
            )
        found["partial_rotary_factor"] = rotated / head_dim
    divisors = _divisors(file, rotated)
    kind = file.text(f"{a}.rope.scaling.type", "none" if divisors else "linear")
    factor = file.get(f"{a}.rope.scaling.factor", file.get(f"{a}.rope.scale_linear")) or 1.0
    if divisors and (kind == "yarn" or (kind == "linear" and factor != 1)):
        raise InteropError(
            f"{file.path}: {a}.rope.scaling.type = {kind!r} cannot be combined with a table of frequencies"
        )
    if divisors:
        return {"rope_parameters": found | _table(file, config, *divisors, theta, rotated)}
    if kind == "yarn" and factor != 1:
        return {"rope_parameters": found | _yarn(file, float(factor))}
    if kind == "linear" and factor != 1:
        return {"rope_parameters": found | {"rope_type": "linear", "factor": float(factor)}}
    if kind not in ("none", "linear", "yarn"):
        raise InteropError(
            f"{file.path}: {a}.rope.scaling.type = {kind!r} cannot be imported without its factors"
        )
    return {"rope_parameters": found | {"rope_type": "default"}}


def _divisors(file: GGUFFile, rotated: int) -> tuple[list[float], list[float]] | None:
    """Divisors of the frequencies up to and beyond the original length, if the file has a table."""
    names = (ROPE_FREQS, ROPE_FREQS) if ROPE_FREQS in file.tensors else (ROPE_SHORT, ROPE_LONG)
    present = [name for name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT) if name in file.tensors]
    if not present:
        return None
    if not ARCHITECTURES[file.architecture].frequency_divisors:
        raise InteropError(
            f"{file.path}: {present[0]} is not used by architecture {file.architecture}"
        )
    found = []
    for name in names:
        tensor = file.named(name)
        if tensor.shape != (rotated // 2,):
            raise InteropError(
                f"{file.path}: {name} has shape {tensor.shape}, but {rotated} features are rotated: "
                f"it must be ({rotated // 2},)"
            )
        found.append(tensor.read().double().tolist())
    return found[0], found[1]


def _table(
    file: GGUFFile, config: dict, short: list[float], long: list[float], theta: float, rotated: int
) -> dict[str, Any]:
    """`longrope` with an explicit attention factor: the only kind of transformers with free divisors."""
    a = file.architecture
    amplitude = file.number(f"{a}.rope.scaling.attn_factor", float, 1.0)
    if short == long and amplitude == 1:
        if all(divisor == 1 for divisor in short):
            return {"rope_type": "default"}
        if found := _as_llama3(short, theta, rotated):
            return found
    length = config["max_position_embeddings"]
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": amplitude,
        "original_max_position_embeddings": file.number(
            f"{a}.rope.scaling.original_context_length", int, length
        ),
    }


def _as_llama3(divisors: list[float], theta: float, rotated: int) -> dict[str, Any] | None:
    """Llama 3's own parameters, of which GGUF files contain only the resulting divisors."""
    scaling = Llama3Scaling.model_validate({"factor": max(1.0, max(divisors))})
    plain = plain_frequencies(theta, rotated)
    expected = plain / scaling.frequencies(plain, max(divisors), 8192)[0]
    if not torch.allclose(torch.tensor(divisors).double(), expected, rtol=1e-5, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": max(divisors),
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": 8192,
    }


def _yarn(file: GGUFFile, factor: float) -> dict[str, Any]:
    prefix = f"{file.architecture}.rope.scaling"
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.number(f"{prefix}.original_context_length"),
        "beta_fast": file.number(f"{prefix}.yarn_beta_fast", float, 32.0),
        "beta_slow": file.number(f"{prefix}.yarn_beta_slow", float, 1.0),
    }
    # llama.cpp multiplies its default amplitude by attn_factor.
    if (times := file.number(f"{prefix}.attn_factor", float, 1.0)) != 1:
        found["attention_factor"] = times * (0.1 * math.log(factor) + 1)
    elif file.get(f"{prefix}.yarn_attn_factor"):
        found["attention_factor"] = file.number(f"{prefix}.yarn_attn_factor", float)
    elif file.get(f"{prefix}.yarn_log_multiplier"):
        found |= {
            "mscale": 1.0,
            "mscale_all_dim": file.number(f"{prefix}.yarn_log_multiplier", float),
        }
    return found


def _smollm3(file: GGUFFile, config: dict) -> dict[str, Any]:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        **_biases(file),
        "no_rope_layers": [int(layer % SMOLLM3_STEP != 0) for layer in layers],
        "no_rope_layer_interval": SMOLLM3_STEP,
        "use_sliding_window": False,
    }


def _biases(file: GGUFFile) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _qwen2(file: GGUFFile, config: dict) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(file: GGUFFile, config: dict) -> dict[str, Any]:
    return {"use_sliding_window": False, "attention_bias": _biases(file)["attention_bias"]}


def _llama(file: GGUFFile, config: dict) -> dict[str, Any]:
    """A Llama, or a Mistral: some converters keep the window of Mistral 7B v0.1, which llama.cpp ignores."""
    if window := file.get("llama.attention.sliding_window"):
        return {"model_type": "mistral", "sliding_window": window}
    if "blk.0.attn_q.bias" in file.tensors and "blk.0.attn_output.bias" not in file.tensors:
        return {"model_type": "qwen2", "use_sliding_window": False}
    return _biases(file)


def _refact(file: GGUFFile, config: dict) -> dict[str, Any]:
    return _biases(file)


def _phi3(file: GGUFFile, config: dict) -> dict[str, Any]:
    window = file.get("phi3.attention.sliding_window") or None
    original = file.number(
        "phi3.rope.scaling.original_context_length", int, config["max_position_embeddings"]
    )
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _granite(file: GGUFFile, config: dict) -> dict[str, Any]:
    a = file.architecture
    head_dim = config["head_dim"]
    found = {
        **_biases(file),
        "attention_multiplier": file.number(f"{a}.attention.scale", float, head_dim**-0.5),
        "embedding_multiplier": file.number(f"{a}.embedding_scale", float, 1.0),
        "residual_multiplier": file.number(f"{a}.residual_scale", float, 1.0),
        "logits_scaling": file.number(f"{a}.logit_scale", float),
    }
    if a == "granite" and file.get("granite.rope.scaling.finetuned") is False:
        raise InteropError(
            f"{file.path}: granite.rope.scaling.finetuned = false (no rotation) cannot be imported: "
            "transformers' Granite always rotates"
        )
    return found


def _granite_swa(file: GGUFFile, config: dict) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    theta = config["rope_parameters"]["rope_theta"]
    windowed = file.items("granite_swa.attention.sliding_window_pattern", bool)
    rotated = file.items("granite_swa.attention.rope_pattern", bool) or [True] * layers
    if len(windowed) != layers or len(rotated) != layers:
        raise InteropError(
            f"{file.path}: granite_swa.attention.sliding_window_pattern and rope_pattern must have one value "
            f"for each of the {layers} layers"
        )
    window = file.number("granite_swa.attention.sliding_window")
    windowed = [local and window < NO_WINDOW for local in windowed]
    return {
        **_granite(file, config),
        "sliding_window": window,
        "layer_types": ["sliding_attention" if local else "full_attention" for local in windowed],
        "layer_rope_theta": [theta if turns else 0 for turns in rotated],
    }


def _ministral3(file: GGUFFile, config: dict) -> dict[str, Any]:
    a = file.architecture
    config["rope_parameters"] |= {
        "llama_4_scaling_beta": float(file.get(f"{a}.attention.temperature_scale", 0.0)),
        "original_max_position_embeddings": file.number(
            f"{a}.rope.scaling.original_context_length", int, config["max_position_embeddings"]
        ),
    }
    return {}


_OTHERS = {
    "llama": _llama,
    "refact": _refact,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "granite": _granite,
    "granite_swa": _granite_swa,
    "mistral3": _ministral3,
}
