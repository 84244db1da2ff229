"""A Hugging Face config.json as our settings; what our decoder would compute otherwise is
refused."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from errors import InteropError
from interop.huggingface.families import DIFFERENCES, FAMILIES, Family
from interop.huggingface.reader import ConfigReader, is_number, shown
from interop.huggingface.rope_config import RopeSource, read_rope, rope_parameters
from model import ModelSettings
from model.model_settings import without_pattern_scheme

GENERATED = "sextant"  # model_type of folders with a generated modeling file
FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class ImportedShape:
    """What a config says of a model.

    Attributes:
        family: None for a folder of our own with a generated modeling file, whose weights have our
            names.
    """

    family: Family | None
    model: ModelSettings
    vocab_size: int
    train_length: int
    original_length: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]


def read_config(config: dict[str, Any], file: str) -> ImportedShape:
    """The model that a config describes.

    Args:
        config: the parsed config.json.
        file: its name, for messages.

    Raises:
        InteropError: names the key that is missing, invalid, or requires what our decoder does not
            compute.
    """
    if config.get("model_type") == GENERATED:
        return _generated(ConfigReader(config, file))
    family = _family(config, file)
    reader = ConfigReader(config, file, family.defaults)
    _refuse(reader)
    heads = reader.number("num_attention_heads", int)
    dim = reader.number("hidden_size", int)
    head_dim = reader.number("head_dim", int, dim // heads)
    if family.architecture == "MiniCPM3ForCausalLM":
        head_dim = reader.number("qk_rope_head_dim", int)  # of the slice with positions
    positions, original_length = _positions(reader, family, head_dim)
    settings = {
        "dim": dim,
        "layers": reader.number("num_hidden_layers", int),
        "heads": heads,
        "kv_heads": reader.number("num_key_value_heads", int, heads),
        "head_dim": head_dim,
        "ffn_dim": reader.number("intermediate_size", int),
        "norm_eps": reader.number("rms_norm_eps", float, 1e-6),
        "tie_embeddings": reader.flag("tie_word_embeddings"),
        **positions,
        **_changes(reader, dim),
        **family.settings,
    }
    return ImportedShape(
        family=family,
        model=_settings(settings, file),
        vocab_size=reader.number("vocab_size", int),
        train_length=reader.number("max_position_embeddings", int),
        original_length=original_length,
        bos_id=next(iter(_ids(reader, "bos_token_id")), None),
        eos_ids=_ids(reader, "eos_token_id"),
    )


def _settings(values: Any, file: str) -> ModelSettings:
    try:
        return ModelSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ": ".join(filter(None, [file, ".".join(map(str, first["loc"]))]))
        raise InteropError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error


def _generated(reader: ConfigReader) -> ImportedShape:
    """A folder that we exported with a modeling file, which is not run: `settings` describes the
    model."""
    return ImportedShape(
        family=None,
        model=_settings(without_pattern_scheme(reader.get("settings")), f"{reader.file}: settings"),
        vocab_size=reader.number("vocab_size", int),
        train_length=reader.number("train_length", int),
        original_length=reader.number("original_length", int),
        bos_id=next(iter(_ids(reader, "bos_token_id")), None),
        eos_ids=_ids(reader, "eos_token_id"),
    )


def _family(config: dict[str, Any], file: str) -> Family:
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        why = DIFFERENCES.get(model_type)
        near = difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.8)
        hint = f" ({why})" if why else f" (did you mean {near[0]}?)" if near else ""
        raise InteropError(
            f"{file}: model_type = {shown(model_type)} cannot be imported{hint}; supported: "
            f"{', '.join(FAMILIES)}"
        )
    architectures = config.get("architectures")
    if architectures in (None, []):
        return family
    if not isinstance(architectures, list) or family.architecture not in architectures:
        raise InteropError(
            f"{file}: architectures = {shown(architectures)} cannot be imported: a {model_type} "
            f"model must be {family.architecture}"
        )
    return family


# Keys that change the result in some model of transformers, and the values under which they do not.
_NEUTRAL: dict[str, tuple] = {
    "hidden_act": (None, "silu", "swish"),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "mlp_bias": (None, False),
    "attention_bias": (None, False),
    "sliding_window": (None,),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (None, 1)),
    "attention_multiplier": (None,),
}
_HINTS = {
    "quantization_config": "save the weights unquantized",
    "hidden_act": "only 'silu' is supported",
}


def _refuse(reader: ConfigReader) -> None:
    """Refuse keys that the family does not define, or whose values are not supported."""
    for key, accepted in _NEUTRAL.items():
        value = reader.get(key)
        if key not in reader.defaults and value not in accepted:
            hint = _HINTS.get(key, f"{reader.get('model_type')} models do not have it")
            raise InteropError(f"{reader.file}: {key} = {shown(value)} cannot be imported: {hint}")


def _changes(reader: ConfigReader, dim: int) -> dict[str, Any]:
    """Settings that differ from a plain Llama's."""
    changes: dict[str, Any] = {}
    if reader.flag("attention_bias"):
        changes["attention_bias"] = "all"
    if reader.flag("mlp_bias"):
        changes["mlp_bias"] = True
    for ours, theirs in (
        ("embedding_multiplier", "embedding_multiplier"),
        ("residual_multiplier", "residual_multiplier"),
        ("attention_multiplier", "attention_multiplier"),
        ("logit_divisor", "logits_scaling"),
        ("logit_softcap", "final_logit_softcapping"),
    ):
        value = reader.number(theirs, float, None)
        if value is not None:
            changes[ours] = float(value)
    if reader.get("model_type") == "lfm2":
        changes |= _lfm2(reader)
    if reader.get("model_type") == "minicpm3":
        changes |= _minicpm3(reader, dim)
    if reader.get("model_type") == "gemma3_text":
        changes["embedding_multiplier"] = dim**0.5
        scalar = reader.number("query_pre_attn_scalar", float)
        changes["attention_multiplier"] = scalar**-0.5
    return changes


def _lfm2(reader: ConfigReader) -> dict[str, Any]:
    """Settings that LFM2 has under names of its own."""
    ffn_dim = reader.number("block_ff_dim", int, reader.number("intermediate_size", int))
    if reader.flag("block_auto_adjust_ff_dim"):
        multiple = reader.number("block_multiple_of", int)
        multiplier = reader.number("block_ffn_dim_multiplier", float, 1.0)
        ffn_dim = int(multiplier * int(2 * ffn_dim / 3))
        ffn_dim = -(-ffn_dim // multiple) * multiple
    changes = {"ffn_dim": ffn_dim, "norm_eps": reader.number("norm_eps", float)}
    if reader.get("tie_embedding") is not None:
        changes["tie_embeddings"] = reader.flag("tie_embedding")
    return changes


def _minicpm3(reader: ConfigReader, dim: int) -> dict[str, Any]:
    """Latent attention and multipliers of MiniCPM3."""
    parameters = rope_parameters(reader)[""]
    if parameters.get("mscale_all_dim"):
        raise InteropError(
            f"{parameters.file}: mscale_all_dim cannot be imported: MiniCPM3 scales q·k by it"
        )
    layers = reader.number("num_hidden_layers", int)
    value_dim = dim // reader.number("num_attention_heads", int)
    changes: dict[str, Any] = {
        "mixer": {
            "name": "latent",
            "rank": reader.number("kv_lora_rank", int),
            "query_rank": reader.number("q_lora_rank", int, None),
            "unrotated_dim": reader.number("qk_nope_head_dim", int),
            "value_dim": reader.number("v_head_dim", int, value_dim),
            "norm_eps": 1e-6,
        },
        "embedding_multiplier": reader.number("scale_emb", float),
        "logit_divisor": dim / reader.number("dim_model_base", int, dim),
    }
    depth = reader.number("scale_depth", float, None)
    if depth is not None:
        changes["residual_multiplier"] = depth / layers**0.5
    return changes


def _positions(
    reader: ConfigReader, family: Family, head_dim: int
) -> tuple[dict[str, Any], int | None]:
    """Our settings of positions, one scheme or kinds of layers, and L0."""
    by_type = rope_parameters(reader)
    types = _layer_types(reader)
    thetas = _layer_thetas(reader)
    window = reader.number("sliding_window", int, None)
    if SLIDING in types and window is None:
        raise InteropError(f"{reader.file}: layer_types has {SLIDING}, but sliding_window is null")
    schemes: list[dict[str, Any]] = []  # settings of each layer
    lengths = set()
    for layer_type, theta in zip(types, thetas, strict=True):
        if layer_type == family.other_type:
            schemes.append(_other_layer(reader))
            continue
        parameters = by_type.get(layer_type) or by_type[""]
        if theta:
            parameters = ConfigReader({**parameters.values, "rope_theta": theta}, parameters.file)
        scheme: dict[str, Any] = {"name": "none"}
        if theta != 0:
            scheme, length = read_rope(RopeSource(parameters, reader, head_dim, family.partial))
            lengths |= {length} - {None}
        scheme |= _modifiers(reader, parameters)
        if layer_type == SLIDING:
            scheme["window"] = window
        schemes.append({"position": scheme})
    if len(lengths) > 1:
        raise InteropError(
            f"{reader.file}: layers with different original lengths "
            f"({', '.join(map(str, sorted(lengths)))}) cannot be imported"
        )
    return _pattern(schemes), next(iter(lengths), None)


def _other_layer(reader: ConfigReader) -> dict[str, Any]:
    """A layer of another mixer than attention: LFM2's gated convolution, or Gated DeltaNet."""
    layer: dict[str, Any] = {"position": {"name": "none"}}
    if reader.get("model_type") == "lfm2":
        width = reader.number("conv_L_cache", int)
        has_bias = reader.flag("conv_bias")
        layer["mixer"] = {"name": "short_convolution", "width": width, "bias": has_bias}
        return layer
    heads = reader.number("num_attention_heads", int)
    layer["heads"] = reader.number("linear_num_value_heads", int, heads)
    key_heads = layer["kv_heads"] = reader.number("linear_num_key_heads", int, heads)
    key_dim = int(0.75 * reader.number("hidden_size", int) / key_heads)
    key_dim = layer["head_dim"] = reader.number("linear_key_head_dim", int, key_dim)
    layer["mixer"] = {
        "name": "recurrent",
        "decay": "head",
        "delta": True,
        "beta": "sigmoid",
        "unit_qk": True,
        "value_dim": reader.number("linear_value_head_dim", int, 2 * key_dim),
        "convolution": reader.number("linear_conv_kernel_dim", int),
        "output_gate": "silu",
    }
    if reader.get("model_type") == "qwen3_5_text":
        layer["gate"] = "none"
        return layer
    layer["norm_placement"] = "input"
    layer["mixer"]["output_norm_eps"] = 1e-5
    layer["mixer"]["beta_max"] = 2.0 if reader.flag("linear_allow_neg_eigval") else 1.0
    return layer


def _modifiers(reader: ConfigReader, parameters: ConfigReader) -> dict[str, Any]:
    """The temperature and sink of a layer."""
    model_type = reader.get("model_type")
    if model_type == "granite_swa":
        return {"sink_logit": "learned"}
    if model_type == "ministral3":
        length = parameters.number("original_max_position_embeddings", int)
        beta = parameters.number("llama_4_scaling_beta", float)
        return {"temperature": {"name": "ministral3", "beta": beta, "length": length}}
    return {}


def _layer_types(reader: ConfigReader) -> list[str]:
    """`full_attention` or `sliding_attention` of each layer."""
    layers = reader.number("num_hidden_layers", int)
    model_type = reader.get("model_type")
    given = reader.get("layer_types")
    window = reader.get("sliding_window")
    if model_type in ("mistral", "ministral3", "phi3"):
        return [FULL if window is None else SLIDING] * layers
    if given is not None:
        is_list = isinstance(given, list) and len(given) >= layers
        known = [FULL, FAMILIES[model_type].other_type or SLIDING]
        if not is_list or not all(name in (*known, SLIDING) for name in given):
            raise InteropError(
                f"{reader.file}: layer_types must be {layers} times {' or '.join(known)}, got "
                f"{shown(given)}"
            )
        given = given[:layers]
        if SLIDING in given and "sliding_window" not in reader.defaults:
            raise InteropError(f"{reader.file}: layer_types: {model_type} models have no {SLIDING}")
        return given
    windowed = window is not None and reader.flag("use_sliding_window")
    if model_type in ("qwen2", "qwen3"):
        first = reader.get("max_window_layers")
        if not is_number(first, int):
            raise InteropError(
                f"{reader.file}: max_window_layers must be an integer, got {shown(first)}"
            )
        return [SLIDING if windowed and i >= first else FULL for i in range(layers)]
    if model_type == "smollm3":
        return [SLIDING if windowed and theta == 0 else FULL for theta in _layer_thetas(reader)]
    if model_type == "granite_swa":
        return [FULL if i % 4 == 0 else SLIDING for i in range(layers)]
    if model_type == "lfm2":
        full = reader.numbers("full_attn_idxs")
        return [FULL if full is None or i in full else "conv" for i in range(layers)]
    if model_type == "olmo_hybrid":
        types = [FULL if i % 4 == 3 else "linear_attention" for i in range(layers)]
        return types if FULL in types else [*types[:-1], FULL]
    if model_type == "qwen3_5_text":
        period = reader.number("full_attention_interval", int)
        return ["linear_attention" if (i + 1) % period else FULL for i in range(layers)]
    if model_type == "gemma3_text":
        period = reader.number("sliding_window_pattern", int)
        return [SLIDING if (i + 1) % period else FULL for i in range(layers)]
    if model_type == "olmo3":
        return [FULL if i % 4 == 3 else SLIDING for i in range(layers)]
    return [FULL] * layers


def _layer_thetas(reader: ConfigReader) -> list[float | None]:
    """The base of each layer where it has its own; 0 without positions, None for that of all
    layers."""
    layers = reader.number("num_hidden_layers", int)
    model_type = reader.get("model_type")
    if model_type == "olmo_hybrid":
        has_rope = reader.object("rope_parameters").get("rope_theta", 1) is not None
        return [None if has_rope else 0.0] * layers  # a base of null: no rotation
    if model_type == "granite_swa":
        given = reader.numbers("layer_rope_theta", layers)
        return [None] * layers if given is None else [*given[:layers]]
    if model_type == "smollm3":
        rotated = reader.numbers("no_rope_layers", layers)  # 1: the layer has RoPE
        if rotated is None:
            interval = reader.number("no_rope_layer_interval", int)
            rotated = [float((i + 1) % interval != 0) for i in range(layers)]
        return [None if is_rotated else 0.0 for is_rotated in rotated[:layers]]
    return [None] * layers


def _pattern(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the only layer kind, or `kinds` in a `pattern` of the shortest period."""
    kinds: dict[str, dict[str, Any]] = {}
    names = []
    for layer in layers:
        name = next((name for name, known in kinds.items() if known == layer), None)
        if name is None:
            position = layer["position"]
            stem = "nope" if position["name"] == "none" else "rope"
            stem += "_window" if "window" in position else ""
            stem = layer["mixer"]["name"] if "mixer" in layer else stem
            same = sum(known.rstrip("0123456789") == stem for known in kinds)
            name = f"{stem}{same + 1}" if same else stem
            kinds[name] = layer
        names.append(name)
    if len(kinds) == 1:
        return layers[0]
    count = len(names)
    period = next(
        p for p in range(1, count + 1) if all(names[i] == names[i % p] for i in range(count))
    )
    return {"pattern": names[:period], "kinds": kinds}


def _ids(reader: ConfigReader, key: str) -> tuple[int, ...]:
    """Token ids: null, one, or several."""
    value = reader.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_number(value, int) for value in values):
        raise InteropError(f"{reader.file}: {key} must be ids of tokens, got {shown(value)}")
    return tuple(values)
