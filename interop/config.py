"""A Hugging Face config.json of a Llama, read as our settings; what we would compute otherwise is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from errors import InteropError
from interop.weights import LAYOUT
from model import ModelSettings
from model.position.scaling import YaRNScaling, plain_frequencies, ramp_ends
from model.position.schemes.rope import RopeSettings


@dataclass(frozen=True)
class ImportedShape:
    """What a config says of a model."""

    model: ModelSettings
    vocab_size: int
    train_length: int
    original_length: int | None
    bos_id: int | None
    eos_id: int | None


def read_config(config: dict[str, Any], file: str) -> ImportedShape:
    """The model a config describes.

    Args:
        config: the parsed config.json.
        file: its name, for messages.

    Raises:
        InteropError: naming the key that is missing, wrong, or asks for what this codebase does not compute.
    """
    _refuse(config, file)
    number = _Reader(config, file)
    train_length = number("max_position_embeddings", int)
    heads = number("num_attention_heads", int)
    position, original_length = _rope(config, train_length, file)
    settings = {
        "dim": number("hidden_size", int),
        "layers": number("num_hidden_layers", int),
        "heads": heads,
        "kv_heads": number("num_key_value_heads", int, heads),
        "head_dim": number("head_dim", int, None),
        "ffn_dim": number("intermediate_size", int),
        "norm_eps": number("rms_norm_eps", float, 1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "position": position,
    }
    try:
        model = ModelSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InteropError(f"{file}: {where}: {first['msg'].removeprefix('Value error, ')}") from error
    _check_ramp(model, original_length or train_length, file)
    return ImportedShape(
        model=model,
        vocab_size=number("vocab_size", int),
        train_length=train_length,
        original_length=original_length,
        bos_id=_id(config.get("bos_token_id")),
        eos_id=_id(config.get("eos_token_id")),
    )


class _Reader:
    def __init__(self, config: dict[str, Any], file: str):
        self.config, self.file = config, file

    def __call__(self, key: str, kind: type, *default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            if default:
                return default[0]
            raise InteropError(f"{self.file} has no '{key}': this is not the config of a Llama model")
        accepted = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted) or not value > 0:
            what = "a whole number above 0" if kind is int else "a number above 0"
            raise InteropError(f"{self.file}: {key} must be {what}, it is {value!r}")
        return value


# Keys that change what is computed, and the only values under which it is what we compute.
_PLAIN: dict[str, tuple] = {
    "model_type": ("llama",),
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1),
    "auto_map": (None,),
}
_WHY = {
    "auto_map": "it names code of its own, which is never run",
    "quantization_config": "save the weights unquantized",
    "model_type": "only plain Llamas can be imported",
}


def _refuse(config: dict[str, Any], file: str) -> None:
    for key, accepted in _PLAIN.items():
        value = config.get(key)
        if value not in accepted:
            why = _WHY.get(
                key, f"only {' or '.join(_json(a) for a in accepted if a is not None)} is supported"
            )
            if accepted == (None,) and key not in _WHY:
                why = "a plain Llama has none"
            raise InteropError(f"{file}: {key} = {_json(value)} cannot be imported: {why}")
    architectures = config.get("architectures")
    if architectures and "LlamaForCausalLM" not in architectures:
        raise InteropError(
            f"{file}: architectures = {_json(architectures)} cannot be imported: only LlamaForCausalLM can"
        )


def _json(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, repr(value)) if _flag(value) else repr(value)
    )


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _rope(config: dict[str, Any], train_length: int, file: str) -> tuple[dict[str, Any], int | None]:
    """Our position settings, and the length its stretch is measured from where the config gives one.

    transformers 5 keeps everything in `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`,
    whose kind was first called `type`.
    """
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InteropError(f"{file}: {key} must be one set of parameters for all layers")
    number = _Reader(rope, f"{file}: {key}")
    theta = number("rope_theta", float, None) or _Reader(config, file)("rope_theta", float, 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rules = {"default": _default, "linear": _linear, "yarn": _yarn, "llama3": _llama3}
    if kind not in rules:
        why = (
            "its frequencies change with the running length, so that cached keys go stale"
            if kind in ("dynamic", "longrope")
            else "unknown rule"
        )
        raise InteropError(
            f"{file}: {key}.rope_type = {kind!r} cannot be imported ({why}); known: {', '.join(rules)}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise InteropError(f"{file}: {key}.partial_rotary_factor is not part of a plain Llama")
    position = {
        "name": "rope",
        "theta": theta,
        "layout": LAYOUT,
        "scaling": rules[kind](rope, number, config, train_length),
    }
    stretched = kind in ("yarn", "llama3")
    return position, _original(config, number, train_length) if stretched else None


def _original(config: dict[str, Any], number: _Reader, train_length: int) -> int:
    # The order of transformers: the key beside the parameters, where present, beats the one inside them.
    key = "original_max_position_embeddings"
    return _Reader(config, number.file)(key, int, None) or number(key, int, train_length)


def _default(rope: dict, number: _Reader, config: dict, train_length: int) -> dict[str, Any]:
    return {"name": "none"}


def _linear(rope: dict, number: _Reader, config: dict, train_length: int) -> dict[str, Any]:
    return {"name": "linear", "factor": number("factor", float)}


def _llama3(rope: dict, number: _Reader, config: dict, train_length: int) -> dict[str, Any]:
    return {
        "name": "llama3",
        "factor": number("factor", float),
        "low_freq_factor": number("low_freq_factor", float),
        "high_freq_factor": number("high_freq_factor", float),
    }


def _yarn(rope: dict, number: _Reader, config: dict, train_length: int) -> dict[str, Any]:
    factor = number("factor", float, train_length / _original(config, number, train_length))
    amplitude = number("attention_factor", float, None)
    # transformers reads 0 as absent.
    mscale, mscale_all = (
        number(key, float, None) if rope.get(key) else None for key in ("mscale", "mscale_all_dim")
    )
    if amplitude is None and mscale and mscale_all:  # DeepSeek's form
        amplitude = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)
    return {
        "name": "yarn",
        "factor": factor,
        "beta_fast": number("beta_fast", float, 32.0),
        "beta_slow": number("beta_slow", float, 1.0),
        "ramp": "dim",
        "truncate": bool(rope.get("truncate", True)),
        "attention_factor": amplitude,
    }


def _check_ramp(model: ModelSettings, original_length: int, file: str) -> None:
    """Refuse a yarn ramp that lies outside the rotated pairs: transformers then runs it backwards."""
    position = model.position
    if not isinstance(position, RopeSettings) or not isinstance(position.scaling, YaRNScaling):
        return
    fast, slow = position.scaling.beta_fast, position.scaling.beta_slow
    spectrum = plain_frequencies(position.theta, model.head_dim)
    low, high = ramp_ends(spectrum, original_length, fast, slow)
    if high <= 0 or low > model.head_dim - 1:
        raise InteropError(
            f"{file}: rope_type 'yarn' cannot be imported with original_max_position_embeddings = "
            f"{original_length}: no rotary pair completes beta_slow = {slow:g} to beta_fast = {fast:g} "
            "rotations within it, and transformers then reverses the ramp"
        )


def _id(value: Any) -> int | None:
    """Several end tokens may be listed; the first is the document's."""
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None
