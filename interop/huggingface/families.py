"""The model families of transformers that can be imported and exported: the names of their weights,
and of their settings in config.json.

families.yaml lists the names; this file has the values that must be computed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from errors import InteropError
from interop.huggingface.reader import ConfigReader, shown
from interop.huggingface.weight_names import WeightMap, weight_map
from model import ModelSettings
from model.mixers.mixer import LayerKind

FULL = "full_attention"
SLIDING = "sliding_attention"
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

Keys = Mapping[str, str]  # setting -> key; `mixer.` for settings of the mixer


class LayerType(NamedTuple):
    """Layers of one type of `layer_types`.

    Attributes:
        weights: names of the weights of a layer, besides the names in `Family.weights`.
        mixer: settings of the mixer, equal in all models.
        settings: other settings specific to these layers.
        keys: keys in config.json of settings specific to these layers.
    """

    weights: WeightMap
    mixer: Mapping[str, Any] = {"name": "attention"}
    settings: Mapping[str, Any] = {}
    keys: Mapping[str, str] = {}


class Family(NamedTuple):
    """One `model_type`.

    Attributes:
        architecture: the class of the causal language model in transformers.
        code: the repository with that class if transformers does not have it. Such a family is used
            only by exports in a published format.
        weights: names of the weights that layers of all types have.
        types: the types of layers; those with windows are of type FULL.
        keys: keys of settings in config.json that differ from `KEYS`.
        defaults: values of absent keys that differ from Llama's. A key that changes the result and
            is not listed is not part of the family.
        computed: functions that compute values of absent or null keys.
        settings: model settings that all models of the family share.
        position: settings that all their positional schemes share.
        accepted: keys that must have one of these values.
        layer_types: the types of layers if `layer_types` is absent, see `default_types`. None:
            `layer_types` is not read, and all layers have the window.
        lists_types: whether `layer_types` can be written.
        check: raises InteropError for models with unsupported layers.
        thetas: the rotary base of each layer: 0 without positions, None for the base in the rotary
            parameters.
        rope_types: the rope types that the class reads; empty: all.
        interleaved: the key of the flag for adjacent features of a pair.
        written: further keys of exports with their values; `$NAME` is replaced by the value that
            `own_entries` computes.
        renamed: parts of the names of weights in files, and their replacements in the class.
        partial: whether `partial_rotary_factor` is supported.
        by_type: whether rotary parameters are nested by layer type.
        divides: whether `hidden_size` must be a multiple of `num_attention_heads`.
        last_is_full: whether the last layer has type FULL regardless of `layer_types`.
        one_plus_norms: whether norms multiply by 1 + weight.
        final_norm: the name of the last norm.
    """

    architecture: str
    weights: WeightMap
    types: Mapping[str, LayerType]
    code: str | None = None
    keys: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}
    computed: Mapping[str, Callable[[ConfigReader], Any]] = {}
    settings: Mapping[str, Any] = {}
    position: Mapping[str, Any] = {}
    accepted: Mapping[str, Sequence] = {}
    layer_types: Mapping[str, Any] | None = {}
    lists_types: bool = True
    check: Callable[[ConfigReader, list[str]], None] = lambda config, types: None
    thetas: Callable[[ConfigReader], list[float | None]] = lambda config: [None] * _depth(config)
    rope_types: Sequence[str] = ()
    interleaved: str | None = None
    written: Mapping[str, Any] = {}
    renamed: Mapping[str, str] = {}
    partial: bool = False
    by_type: bool = False
    divides: bool = False
    last_is_full: bool = False
    one_plus_norms: bool = False
    final_norm: str = "model.norm"

    def type_of(self, name: str) -> LayerType:
        return self.types.get(name) or self.types[FULL]

    def types_of(self, kinds: Sequence[LayerKind]) -> list[str] | None:
        """The types of layers of these kinds, or None if the family does not have them."""
        by_mixer = {layer.mixer["name"]: name for name, layer in self.types.items()}
        types = [by_mixer.get(kind.mixer.name) for kind in kinds]
        for i, kind in enumerate(kinds):
            if types[i] in (FULL, SLIDING):
                types[i] = FULL if kind.position.window is None else SLIDING
        known = [each for each in types if each is not None]
        return known if len(known) == len(types) else None

    def default_types(self, config: ConfigReader) -> list[str]:
        """The types of layers without `layer_types`. FULL: layer `full` of each `period` (a number
        or a key) from `start` on, the layers that the key `listed` lists, and layers without
        windows. All other layers have the type `other`, or with `windowed` SLIDING."""
        depth = _depth(config)
        given = self.layer_types or {}
        other = given.get("other", FULL)
        full: list[float] = []
        if "period" in given:
            period = given["period"]
            period = config.number(period, int) if isinstance(period, str) else period
            start = given.get("start", 0)
            full = [i for i in range(start, depth) if i % period == given["full"] % period]
        elif "listed" in given:
            listed = config.numbers(given["listed"])
            if listed is None:
                other = given["if_absent"]
            full = listed or []
        elif "windowed" in given:
            is_used = config.get("sliding_window") is not None and config.flag("use_sliding_window")
            other = SLIDING if is_used else FULL
            if given["windowed"] == "max_window_layers":
                full = [*range(min(depth, config.count("max_window_layers")))]
            else:  # layers without positions
                full = [i for i, theta in enumerate(self.thetas(config)) if theta != 0]
        return [FULL if i in full else other for i in range(depth)]

    def own_entries(
        self, types: list[str], kinds: Sequence[LayerKind], thetas: list[float]
    ) -> dict[str, Any]:
        """The entries of `written`, computed from the types, settings and rotary bases (0 without
        positions) of the layers."""
        position = kinds[0].position
        is_interleaved = getattr(position, "layout", "half") == "interleaved"
        full = [i for i, name in enumerate(types) if name == FULL]
        values = {
            "$bases": thetas,
            "$first_base": thetas[0],
            "$rotated": [int(theta > 0) for theta in thetas],
            "$rope_or_null": "rope" if any(thetas) else None,
            "$unrotated": {} if any(thetas) else {"rope_type": "default", "rope_theta": None},
            "$depth": len(types),
            "$dense": ["dense"] * len(types),
            "$full_layers": full,
            "$sizes_of_full_layers": {
                str(i): {"head_dim": kinds[i].head_dim, "num_key_value_heads": kinds[i].kv_heads}
                for i in full
            },
            "$rope_dim": int(kinds[0].head_dim * getattr(position, "fraction", 1.0)) // 2 * 2,
            "$layout": "lingua" if is_interleaved else "huggingface",
        }
        entries = {
            key: values[value] if isinstance(value, str) else value
            for key, value in self.written.items()
        }
        return {key: value for key, value in entries.items() if value != {}}

    def weight_map(
        self, settings: ModelSettings, ours: Iterable[str]
    ) -> tuple[dict[str, list[str]], list[str]]:
        """The tensors of a whole model; see `weight_map`."""
        kinds = settings.resolved_kinds
        types = self.types_of([kinds[name] for name in settings.layer_kinds])
        assert types is not None
        outer = {"model.embed_tokens": "embed", "lm_head": "head", self.final_norm: "norm"}
        layers = [{**self.weights, **self.type_of(name).weights} for name in types]
        return weight_map(outer, layers, ours)


def _depth(config: ConfigReader) -> int:
    return config.size("num_hidden_layers")


def _smollm_thetas(config: ConfigReader) -> list[float | None]:
    depth = _depth(config)
    rotated = config.numbers("no_rope_layers", depth)  # 1: the layer has RoPE
    if rotated is None:
        interval = config.number("no_rope_layer_interval", int)
        rotated = [float((i + 1) % interval != 0) for i in range(depth)]
    return [None if is_rotated else 0.0 for is_rotated in rotated[:depth]]


def _granite_thetas(config: ConfigReader) -> list[float | None]:
    depth = _depth(config)
    given = config.numbers("layer_rope_theta", depth)
    return [None] * depth if given is None else [*given[:depth]]


def _thetas_if(
    has_rope: Callable[[ConfigReader], bool],
) -> Callable[[ConfigReader], list[float | None]]:
    return lambda config: [None if has_rope(config) else 0.0] * _depth(config)


def _refuse_experts(config: ConfigReader, types: list[str]) -> None:
    dense = config.get("mlp_layer_types")
    if dense is None:
        dense = ["dense"] * min(config.count("first_k_dense_replace"), len(types))
    if dense != ["dense"] * len(types):
        raise InteropError(
            f"{config.file}: layers of experts cannot be imported: first_k_dense_replace, or "
            "mlp_layer_types, must make all layers dense"
        )


def _refuse_other_layers(config: ConfigReader, types: list[str]) -> None:
    """Refuse a `per_layer_config` unless it gives all full layers, and no others, the same
    sizes."""
    own = config.object("per_layer_config")
    full = {str(i) for i, name in enumerate(types) if name == FULL}
    entries = list(own.values())
    if own and (set(own) != full or not all(one == entries[0] for one in entries)):
        raise InteropError(
            f"{config.file}: per_layer_config cannot be imported unless all layers of type {FULL}, "
            "and no others, have the same sizes of their own"
        )


def _of_full_layers(
    key: str, older: str, applies: str | None = None
) -> Callable[[ConfigReader], int | None]:
    """A function that reads a size of Gemma 4's full layers. Older files have the key `older` for
    it."""

    def read(config: ConfigReader) -> int | None:
        own = config.object("per_layer_config")
        value = None
        if own:
            value = config.within("per_layer_config", next(iter(own))).size(key, None)
        elif applies is None or config.flag(applies):
            value = config.size(older, None)
        return None if value == config.size(key) else value

    return read


def _lfm2_ffn_dim(config: ConfigReader) -> int:
    width = config.size("block_ff_dim", None) or config.size("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    multiple = config.number("block_multiple_of", int)
    width = int(config.number("block_ffn_dim_multiplier", float, 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


def _query_scalar(scale: float, settings: Mapping[str, Any]) -> int:
    """Gemma 3's `query_pre_attn_scalar`, an integer: the inverse square of the scale of q·k if that
    is an integer, or else the head dimension, with the remaining factor in the weights."""
    scalar = round(scale**-2)
    return scalar if abs(scalar - scale**-2) < 1e-9 * scalar else settings["head_dim"]


def _heads_per_released(config: ConfigReader) -> tuple[float, float]:
    """Our number of query heads per `num_attention_heads`, and of key/value heads per
    `num_key_value_heads`. RoPE++ counts projected queries (imag2, EC), or heads that it halves
    (imag1, EH)."""
    given = config.object("rope_config")
    if not given.get("imag"):
        return 1, 1
    ratios = {"imag1": (1, 0.5), "imag2": (2, 1)}.get(str(given.get("imag_mode")))
    if ratios is None or given.keys() - {"imag", "imag_mode"}:
        raise InteropError(
            f"{config.file}: rope_config = {shown(given)} cannot be imported: of RoPE++ only "
            "imag_mode imag1 and imag2 without scaling are supported"
        )
    return ratios


class Conversion(NamedTuple):
    """A key of families.yaml whose value differs from our setting.

    Attributes:
        read: returns the setting; None leaves it out.
        name: the key in config.json; empty: no key is written.
        write: returns the value, from the setting and from all settings.
    """

    read: Callable[[ConfigReader], Any]
    name: str = ""
    write: Callable[[Any, Mapping[str, Any]], Any] = lambda value, settings: value


def _flag_conversion(key: str, if_true: Any, if_false: Any) -> Conversion:
    """The conversion between a flag and a setting with these two values."""
    return Conversion(
        lambda config: if_true if config.flag(key) else if_false,
        key,
        lambda value, settings: value == if_true,
    )


CONVERSIONS: dict[str, Conversion] = {
    **{key: _flag_conversion(key, *values) for key, values in TABLE["flag_values"].items()},
    "rope_pp_heads": Conversion(
        lambda config: int(config.size("num_attention_heads") * _heads_per_released(config)[0]),
        "num_attention_heads",
    ),
    "rope_pp_kv_heads": Conversion(
        lambda config: int(config.size("num_key_value_heads") * _heads_per_released(config)[1]),
        "num_key_value_heads",
    ),
    "canon_set": Conversion(
        lambda config: tuple(sorted(set(config.get("canon_set") or ""))),
        "canon_set",
        lambda value, settings: "".join(value),
    ),
    "sqrt_hidden_size": Conversion(lambda config: config.size("hidden_size") ** 0.5),
    "query_pre_attn_scalar": Conversion(
        lambda config: config.number("query_pre_attn_scalar", float) ** -0.5,
        "query_pre_attn_scalar",
        _query_scalar,
    ),
    "global_head_dim": Conversion(_of_full_layers("head_dim", "global_head_dim")),
    "num_global_key_value_heads": Conversion(
        _of_full_layers("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v")
    ),
    "block_ff_dim": Conversion(_lfm2_ffn_dim, "intermediate_size"),
    "tie_embedding": Conversion(
        lambda config: config.flag(
            "tie_word_embeddings" if config.get("tie_embedding") is None else "tie_embedding"
        ),
        "tie_word_embeddings",
    ),
    "mamba_expand": Conversion(
        lambda config: (
            config.size("mamba_expand") * config.size("hidden_size") // config.size("mamba_n_heads")
        ),
        "mamba_expand",
        lambda value, settings: value * settings["heads"] // settings["dim"],
    ),
    "shared_latent": Conversion(
        lambda config: 1, "num_key_value_heads", lambda value, settings: settings["heads"]
    ),
    "scale_depth": Conversion(
        lambda config: (
            config.number("scale_depth", float, _depth(config) ** 0.5) / _depth(config) ** 0.5
        ),
        "scale_depth",
        lambda value, settings: value * settings["layers"] ** 0.5,
    ),
    "dim_model_base": Conversion(
        lambda config: (
            config.size("hidden_size")
            / config.number("dim_model_base", int, config.size("hidden_size"))
        ),
        "dim_model_base",
        lambda value, settings: round(settings["dim"] / value),
    ),
}

# The attributes of families that are functions.
_COMPUTED: dict[str, dict[str, Any]] = {
    "smollm3": {"thetas": _smollm_thetas},
    "granite_swa": {"thetas": _granite_thetas},
    "gemma4_text": {"check": _refuse_other_layers},
    "olmo_hybrid": {
        # a base of null means no rotation
        "thetas": _thetas_if(
            lambda config: config.object("rope_parameters").get("rope_theta", 1) is not None
        ),
    },
    "granitemoehybrid": {
        "thetas": _thetas_if(lambda config: config.get("position_embedding_type") == "rope"),
    },
    "deepseek_v3": {"check": _refuse_experts},
    "kimi_linear": {"check": _refuse_experts, "thetas": _thetas_if(lambda config: False)},
}
# Values of absent or null keys that are not copied from another key.
_DERIVED: dict[str, Callable[[ConfigReader], Any]] = {
    "default_eps": lambda config: 1e-6,
    "dim_per_head": lambda config: config.size("hidden_size") // config.size("num_attention_heads"),
    "dim_per_key_head": lambda config: int(
        0.75 * config.size("hidden_size") / config.size("linear_num_key_heads")
    ),
    "twice_key_dim": lambda config: 2 * config.size("linear_key_head_dim"),
    "is_lingua": lambda config: config.get("rope_version") == "lingua",
    "rope_dim_share": lambda config: (
        config.size("rope_dim", config.size("head_dim")) / config.size("head_dim")
    ),
}


def _derived(name: str) -> Callable[[ConfigReader], Any]:
    """The function of this name in `_DERIVED`, or one that returns the value of another key."""
    return _DERIVED.get(name, lambda config: config.get(name))


def _family(name: str) -> Family:
    entry = TABLE["every"] | TABLE["families"][name] | _COMPUTED.get(name, {})
    types = {layer: LayerType(**values) for layer, values in entry["types"].items()}
    absent = TABLE["every"]["computed"] | entry["computed"]
    computed = {key: _derived(value) for key, value in absent.items()}
    return Family(**{**entry, "types": types, "computed": computed})


FAMILIES = {name: _family(name) for name in TABLE["families"]}
DIFFERENCES = {name: why for why, names in TABLE["others"].items() for name in names.split()}
