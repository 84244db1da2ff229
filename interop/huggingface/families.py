"""The model families of transformers that are imported and exported: the names of their weights and
of their settings in config.json.

A family states what its configuration class assumes for keys that a config.json leaves out
(transformers 5.23), because older versions of a config.json leave out many.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from errors import InteropError
from interop.huggingface.reader import ConfigReader
from interop.huggingface.weight_names import (
    ATTENTION,
    BOTH_NORMS,
    GATED_ATTENTION,
    JOINT_ATTENTION,
    KIMI_DELTA,
    LATENT,
    LFM2_ATTENTION,
    MAMBA,
    MLP,
    NORMS,
    OLMO_DELTA,
    OUTPUT_NORMS,
    QWEN_DELTA,
    SHORT_CONVOLUTION,
    WeightMap,
    weight_map,
)
from model import ModelSettings
from model.mixers.base import LayerKind

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
CONVOLUTION = "conv"


class Key(NamedTuple):
    """A setting whose value is not that of a key of config.json.

    Attributes:
        name: the key; empty: nothing is written.
        read: the setting; None leaves it out.
        write: the value, from the setting and from all settings.
    """

    name: str
    read: Callable[[ConfigReader], Any]
    write: Callable[[Any, Mapping[str, Any]], Any] = lambda value, settings: value


Keys = Mapping[str, str | Key]  # setting -> key; `mixer.` for settings of the mixer


class LayerType(NamedTuple):
    """Layers of one type of `layer_types`.

    Attributes:
        weights: names of the weights of a layer, besides the family's.
        mixer: settings of the mixer that all models share.
        settings: other settings that such layers have of their own.
        keys: their settings in config.json.
    """

    weights: WeightMap
    mixer: Mapping[str, Any] = {"name": "attention"}
    settings: Mapping[str, Any] = {}
    keys: Mapping[str, str | Key] = {}


class Family(NamedTuple):
    """One `model_type`.

    Attributes:
        architecture: the class of the causal language model in transformers.
        weights: names of the weights that layers of all types have.
        types: the types of layers; those with windows are of type FULL.
        keys: settings in config.json, where they are not those of `KEYS`.
        defaults: values of absent keys, where they are not those of Llama. A key that changes the
            result and is not listed is not part of the family.
        computed: values of keys that are absent or null.
        settings: model settings that all models of the family share.
        position: settings that all their positional schemes share.
        accepted: keys that must have one of these values.
        layer_types: the type of each layer if `layer_types` is absent. None: it is not read, and
            all layers have the window.
        lists_types: whether `layer_types` can be written.
        check: refuses models with layers of these types.
        thetas: the rotary base of each layer: 0 without positions, None for that of the rotary
            parameters.
        rope_types: those that the class reads, if not all.
        interleaved: the key that says whether the features of a pair are adjacent.
        written: keys with values that exports have besides, from the types, settings and rotary
            bases (0 without positions) of the layers.
        renamed: parts of the names of weights in files, and what the class has instead.
        partial: whether `partial_rotary_factor` is supported.
        by_type: whether rotary parameters are nested by layer type only.
        divides: whether `hidden_size` must be a multiple of `num_attention_heads`.
        last_is_full: whether the last layer has type FULL whatever `layer_types` says.
        one_plus_norms: whether norms multiply by 1 + weight.
        final_norm: the name of the last norm.
    """

    architecture: str
    weights: WeightMap = NORMS | MLP
    types: Mapping[str, LayerType] = {FULL: LayerType(ATTENTION)}
    keys: Mapping[str, str | Key] = {}
    defaults: Mapping[str, Any] = {}
    computed: Mapping[str, Callable[[ConfigReader], Any]] = {}
    settings: Mapping[str, Any] = {}
    position: Mapping[str, Any] = {}
    accepted: Mapping[str, tuple] = {}
    layer_types: Callable[[ConfigReader], list[str]] | None = lambda config: [FULL] * _depth(config)
    lists_types: bool = True
    check: Callable[[ConfigReader, list[str]], None] = lambda config, types: None
    thetas: Callable[[ConfigReader], list[float | None]] = lambda config: [None] * _depth(config)
    rope_types: tuple[str, ...] = ()
    interleaved: str | None = None
    written: Callable[[list[str], list[LayerKind], list[float]], Mapping[str, Any]] = (
        lambda types, kinds, thetas: {}
    )
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
        return None if None in types else types

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


def _periodic(period: int | str, full: int, other: str) -> Callable[[ConfigReader], list[str]]:
    """Full attention in layer `full` of each `period` layers, a number or a key."""

    def types(config: ConfigReader) -> list[str]:
        count = config.number(period, int) if isinstance(period, str) else period
        return [FULL if i % count == full % count else other for i in range(_depth(config))]

    return types


def _indexed(key: str, other: str, if_absent: str) -> Callable[[ConfigReader], list[str]]:
    """Full attention in the layers that a key lists."""

    def types(config: ConfigReader) -> list[str]:
        full = config.numbers(key)
        depth = _depth(config)
        if full is None:
            return [if_absent] * depth
        return [FULL if i in full else other for i in range(depth)]

    return types


def _windowed_if(
    is_windowed: Callable[[ConfigReader], list[bool]],
) -> Callable[[ConfigReader], list[str]]:
    """Windows in some layers, if they are used at all."""

    def types(config: ConfigReader) -> list[str]:
        is_used = config.get("sliding_window") is not None and config.flag("use_sliding_window")
        return [SLIDING if is_used and windowed else FULL for windowed in is_windowed(config)]

    return types


_qwen_types = _windowed_if(
    lambda config: [i >= config.count("max_window_layers") for i in range(_depth(config))]
)


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
    """`per_layer_config` is read where it gives all full layers the same sizes."""
    own = config.object("per_layer_config")
    full = {str(i) for i, name in enumerate(types) if name == FULL}
    entries = list(own.values())
    if own and (set(own) != full or not all(one == entries[0] for one in entries)):
        raise InteropError(
            f"{config.file}: per_layer_config cannot be imported unless all layers of type {FULL}, "
            "and no others, have the same sizes of their own"
        )


def _of_full_layers(key: str, older: str, applies: str | None = None) -> Key:
    """A size of Gemma 4's full layers; older files have a key for them."""

    def read(config: ConfigReader) -> int | None:
        own = config.object("per_layer_config")
        value = None
        if own:
            value = config.within("per_layer_config", next(iter(own))).size(key, None)
        elif applies is None or config.flag(applies):
            value = config.size(older, None)
        return None if value == config.size(key) else value

    return Key("", read)


def _lfm2_ffn_dim(config: ConfigReader) -> int:
    width = config.size("block_ff_dim", None) or config.size("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    multiple = config.number("block_multiple_of", int)
    width = int(config.number("block_ffn_dim_multiplier", float, 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


_BIASES = {"attention_bias": False, "mlp_bias": False}
_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_QWEN = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "attention_bias": False,
    "tie_word_embeddings": True,
    "final_logit_softcapping": None,
}
_GEMMA_EMBEDDING = Key("", lambda config: config.size("hidden_size") ** 0.5)
_GEMMA_SETTINGS = {"qk_norm": True, "norm_placement": "both", "activation": "gelu_tanh"}


def _query_scalar(scale: float, settings: Mapping[str, Any]) -> int:
    """Gemma 3's `query_pre_attn_scalar`, an integer: that of the scale of q·k, or the head
    dimension, and the rest is a factor of the weights."""
    scalar = round(scale**-2)
    return scalar if abs(scalar - scale**-2) < 1e-9 * scalar else settings["head_dim"]


_LATENT_KEYS: Keys = {
    "head_dim": "qk_rope_head_dim",
    "kv_heads": Key(
        "num_key_value_heads", lambda config: 1, lambda value, settings: settings["heads"]
    ),
}
_LATENT_LAYER = LayerType(
    LATENT,
    mixer={"name": "latent", "norm_eps": 1e-6},
    keys={
        "mixer.rank": "kv_lora_rank",
        "mixer.query_rank": "q_lora_rank",
        "mixer.unrotated_dim": "qk_nope_head_dim",
        "mixer.value_dim": "v_head_dim",
    },
)
_DELTA = {
    "name": "recurrent",
    "decay": "head",
    "delta": True,
    "beta": "sigmoid",
    "unit_qk": True,
    "output_gate": "silu",
}
_DELTA_KEYS: Keys = {
    "heads": "linear_num_value_heads",
    "kv_heads": "linear_num_key_heads",
    "head_dim": "linear_key_head_dim",
    "mixer.value_dim": "linear_value_head_dim",
    "mixer.convolution": "linear_conv_kernel_dim",
}
_KIMI_LAYER = LayerType(
    KIMI_DELTA,
    mixer=_DELTA | {"decay": "channel", "output_gate": "sigmoid"},
    keys={
        "heads": "linear_num_heads",
        "kv_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "mixer.decay_rank": "linear_head_dim",
        "mixer.gate_rank": "linear_head_dim",
        "mixer.convolution": "linear_conv_kernel_dim",
    },
)
_MAMBA_LAYER = LayerType(
    MAMBA,
    mixer={
        "name": "recurrent",
        "decay": "head",
        "beta": "step",
        "scale": 1.0,
        "skip": True,
        "output_norm": "group",
        "output_gate": "silu",
        "gate_first": True,
    },
    keys={
        "heads": "mamba_n_heads",
        "kv_heads": "mamba_n_groups",
        "head_dim": "mamba_d_state",
        "mixer.value_dim": Key(
            "mamba_expand",
            lambda config: (
                config.size("mamba_expand")
                * config.size("hidden_size")
                // config.size("mamba_n_heads")
            ),
            lambda value, settings: value * settings["heads"] // settings["dim"],
        ),
        "mixer.convolution": "mamba_d_conv",
        "mixer.convolution_bias": "mamba_conv_bias",
    },
)
_MAMBA_ACCEPTED = {
    "mamba_proj_bias": (None, False),
    "time_step_limit": (None, [0.0, {"__float__": "Infinity"}], [0.0, float("inf")]),
}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", defaults=_BIASES, divides=True),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"sliding_window": 4096},
        layer_types=None,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        defaults=_QWEN,
        settings={"attention_bias": "qkv"},
        layer_types=_qwen_types,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults=_QWEN | {"attention_bias": False},
        settings={"qk_norm": True},
        layer_types=_qwen_types,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        weights=NORMS | {"mlp.gate_up_proj": "mlp.gate mlp.up", "mlp.down_proj": "mlp.down"},
        types={FULL: LayerType(JOINT_ATTENTION)},
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
        },
        layer_types=None,
        rope_types=("default", "longrope"),
        partial=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        defaults={
            **_BIASES,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
        },
        layer_types=_windowed_if(lambda config: [theta == 0 for theta in _smollm_thetas(config)]),
        thetas=_smollm_thetas,
        written=lambda types, kinds, thetas: {
            "no_rope_layers": [int(theta > 0) for theta in thetas]
        },
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        position={"temperature": {"name": "ministral3"}},
        layer_types=None,
    ),
    "granite": Family("GraniteForCausalLM", defaults=_BIASES | _MULTIPLIERS),
    "granite_swa": Family(
        "GraniteSWAForCausalLM",
        defaults={
            **_BIASES,
            **_MULTIPLIERS,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
        position={"sink_logit": "learned"},
        layer_types=_periodic(4, 0, SLIDING),
        thetas=_granite_thetas,
        written=lambda types, kinds, thetas: {"layer_rope_theta": thetas},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        weights=OUTPUT_NORMS | MLP,
        defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
        settings={"qk_norm": "all_heads", "norm_placement": "output"},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        weights=OUTPUT_NORMS | MLP,
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "sliding_window": 4096,
            "rope_theta": 500_000.0,
        },
        settings={"qk_norm": "all_heads", "norm_placement": "output"},
        layer_types=_periodic(4, -1, SLIDING),
        by_type=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        weights=BOTH_NORMS | MLP,
        keys={
            "embedding_multiplier": _GEMMA_EMBEDDING,
            "attention_multiplier": Key(
                "query_pre_attn_scalar",
                lambda config: config.number("query_pre_attn_scalar", float) ** -0.5,
                _query_scalar,
            ),
        },
        defaults={
            **_GEMMA,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        settings=_GEMMA_SETTINGS,
        layer_types=_periodic("sliding_window_pattern", -1, SLIDING),
        by_type=True,
        divides=True,
        one_plus_norms=True,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        weights=BOTH_NORMS | MLP | {"layer_scalar": "scale"},
        types={
            FULL: LayerType(
                ATTENTION,
                keys={
                    "head_dim": _of_full_layers("head_dim", "global_head_dim"),
                    "kv_heads": _of_full_layers(
                        "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v"
                    ),
                },
            ),
            SLIDING: LayerType(ATTENTION),
        },
        keys={"embedding_multiplier": _GEMMA_EMBEDDING},
        defaults={
            **_GEMMA,
            "global_head_dim": 512,
            "per_layer_config": None,
            "attention_k_eq_v": False,
            "sliding_window": 512,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            },
            "hidden_size_per_layer_input": 256,
        },
        settings=_GEMMA_SETTINGS
        | {"value_norm": True, "layer_scale": True, "attention_multiplier": 1.0},
        accepted={
            "rope_scaling": (None,),
            "hidden_size_per_layer_input": (0,),
            "num_kv_shared_layers": (None, 0),
            "enable_moe_block": (None, False),
        },
        layer_types=_periodic(6, -1, SLIDING),
        check=_refuse_other_layers,
        written=lambda types, kinds, thetas: {
            "hidden_size_per_layer_input": 0,
            "per_layer_config": {
                str(i): {"head_dim": kind.head_dim, "num_key_value_heads": kind.kv_heads}
                for i, kind in enumerate(kinds)
                if types[i] == FULL
            },
        },
        by_type=True,
        last_is_full=True,
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        weights={
            "operator_norm": "attention_norm",
            "ffn_norm": "mlp_norm",
            "feed_forward.w1": "mlp.gate",
            "feed_forward.w3": "mlp.up",
            "feed_forward.w2": "mlp.down",
        },
        types={
            FULL: LayerType(LFM2_ATTENTION),
            CONVOLUTION: LayerType(
                SHORT_CONVOLUTION,
                mixer={"name": "short_convolution"},
                keys={"mixer.width": "conv_L_cache", "mixer.bias": "conv_bias"},
            ),
        },
        keys={
            "ffn_dim": Key("intermediate_size", _lfm2_ffn_dim),
            "norm_eps": "norm_eps",
            "tie_embeddings": Key(
                "tie_word_embeddings",
                lambda config: config.flag(
                    "tie_word_embeddings"
                    if config.get("tie_embedding") is None
                    else "tie_embedding"
                ),
            ),
        },
        defaults={
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_auto_adjust_ff_dim": True,
        },
        settings={"qk_norm": True},
        layer_types=_indexed("full_attn_idxs", CONVOLUTION, FULL),
        written=lambda types, kinds, thetas: {"block_auto_adjust_ff_dim": False},
        final_norm="model.embedding_norm",
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        types={
            FULL: LayerType(GATED_ATTENTION),
            LINEAR: LayerType(
                QWEN_DELTA, mixer=_DELTA, settings={"gate": "none"}, keys=_DELTA_KEYS
            ),
        },
        defaults={"partial_rotary_factor": 0.25, "full_attention_interval": 4},
        settings={"qk_norm": True, "gate": "channel"},
        layer_types=_periodic("full_attention_interval", -1, LINEAR),
        partial=True,
        one_plus_norms=True,
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        weights=MLP,
        types={
            FULL: LayerType(OUTPUT_NORMS | ATTENTION),
            LINEAR: LayerType(
                NORMS | OLMO_DELTA,
                mixer=_DELTA | {"output_norm_eps": 1e-5},
                settings={"norm_placement": "input"},
                keys={
                    **_DELTA_KEYS,
                    "mixer.beta_max": Key(
                        "linear_allow_neg_eigval",
                        lambda config: 2.0 if config.flag("linear_allow_neg_eigval") else 1.0,
                        lambda value, settings: value == 2,
                    ),
                },
            ),
        },
        defaults={"attention_bias": False, "linear_allow_neg_eigval": True},
        computed={
            "linear_num_key_heads": lambda config: config.size("num_attention_heads"),
            "linear_num_value_heads": lambda config: config.size("num_attention_heads"),
            "linear_key_head_dim": lambda config: int(
                0.75 * config.size("hidden_size") / config.size("linear_num_key_heads")
            ),
            "linear_value_head_dim": lambda config: 2 * config.size("linear_key_head_dim"),
        },
        settings={"qk_norm": "all_heads", "norm_placement": "output"},
        layer_types=_periodic(4, -1, LINEAR),
        # a base of null: no rotation
        thetas=_thetas_if(
            lambda config: config.object("rope_parameters").get("rope_theta", 1) is not None
        ),
        written=lambda types, kinds, thetas: (
            {} if any(thetas) else {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        ),
        renamed={
            "attention_layer_norm": "input_layernorm",
            "feedforward_layer_norm": "post_attention_layernorm",
        },
    ),
    "bamba": Family(
        "BambaForCausalLM",
        weights={
            "input_layernorm": "attention_norm",
            "pre_ff_layernorm": "mlp_norm",
            "feed_forward.gate_proj": "mlp.gate",
            "feed_forward.up_proj": "mlp.up",
            "feed_forward.down_proj": "mlp.down",
        },
        types={FULL: LayerType(ATTENTION), LINEAR: _MAMBA_LAYER},
        defaults={
            **_BIASES,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        accepted=_MAMBA_ACCEPTED,
        lists_types=False,
        layer_types=_indexed("attn_layer_indices", LINEAR, LINEAR),
        written=lambda types, kinds, thetas: {
            "attn_layer_indices": [i for i, name in enumerate(types) if name == FULL]
        },
        partial=True,
        final_norm="model.final_layernorm",
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        weights={
            **NORMS,
            "shared_mlp.input_linear": "mlp.gate mlp.up",
            "shared_mlp.output_linear": "mlp.down",
        },
        types={FULL: LayerType(ATTENTION), LINEAR: _MAMBA_LAYER},
        keys={"ffn_dim": "shared_intermediate_size"},
        defaults={
            **_MULTIPLIERS,
            "attention_bias": False,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
        },
        accepted=_MAMBA_ACCEPTED | {"num_local_experts": (0,)},
        layer_types=lambda config: [LINEAR] * _depth(config),
        thetas=_thetas_if(lambda config: config.get("position_embedding_type") == "rope"),
        written=lambda types, kinds, thetas: {
            "num_local_experts": 0,
            "position_embedding_type": "rope" if any(thetas) else None,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        types={FULL: _LATENT_LAYER},
        keys=_LATENT_KEYS,
        defaults={"rope_interleave": True, "first_k_dense_replace": 3},
        check=_refuse_experts,
        written=lambda types, kinds, thetas: {"first_k_dense_replace": len(types)},
        interleaved="rope_interleave",
    ),
    "youtu": Family(
        "YoutuForCausalLM",
        types={FULL: _LATENT_LAYER},
        keys=_LATENT_KEYS,
        defaults={"tie_word_embeddings": True, "rope_interleave": True},
        interleaved="rope_interleave",
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        types={FULL: _LATENT_LAYER},
        keys={
            **_LATENT_KEYS,
            "embedding_multiplier": "scale_emb",
            "residual_multiplier": Key(
                "scale_depth",
                lambda config: (
                    config.number("scale_depth", float, _depth(config) ** 0.5)
                    / _depth(config) ** 0.5
                ),
                lambda value, settings: value * settings["layers"] ** 0.5,
            ),
            "logit_divisor": Key(
                "dim_model_base",
                lambda config: (
                    config.size("hidden_size")
                    / config.number("dim_model_base", int, config.size("hidden_size"))
                ),
                lambda value, settings: round(settings["dim"] / value),
            ),
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        computed={
            "v_head_dim": lambda config: (
                config.size("hidden_size") // config.size("num_attention_heads")
            )
        },
        divides=True,
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        types={FULL: _LATENT_LAYER, LINEAR: _KIMI_LAYER},
        keys=_LATENT_KEYS,
        computed={"max_position_embeddings": lambda config: config.get("model_max_length")},
        defaults={"rms_norm_eps": 1e-5, "first_k_dense_replace": 1},
        accepted={"linear_attn_config": (None,)},
        layer_types=lambda config: [
            FULL if i and i % 4 == 0 else LINEAR for i in range(_depth(config))
        ],
        check=_refuse_experts,
        thetas=_thetas_if(lambda config: False),
        written=lambda types, kinds, thetas: {"mlp_layer_types": ["dense"] * len(types)},
        renamed={
            "block_sparse_moe.": "mlp.",
            "self_attn.f_": "self_attn.forget_gate.f_",
            "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
            "self_attn.A_log": "self_attn.forget_gate.A_log",
        },
    ),
}

# What other families compute that our decoder does not, for the error message.
_OTHERS: dict[str, str] = {
    "LayerNorm and an MLP without a gate": "gpt2 gpt_bigcode opt bloom mpt",
    "LayerNorm and parallel blocks": "gpt_neox gptj gpt_neo phi stablelm falcon codegen",
    "blocks that differ from Gemma 3's": "gemma gemma2",
    "images; save its language model as gemma3_text": "gemma3",
    "images; save its language model as gemma4_text": "gemma4",
    "images; save its language model as qwen3_5_text": "qwen3_5",
    "LayerNorm": "olmo cohere cohere2 starcoder2 persimmon nemotron",
    "layers of experts": (
        "mixtral qwen2_moe qwen3_moe granitemoe olmoe phimoe gpt_oss lfm2_moe qwen3_next "
        "qwen3_5_moe qwen3_5_moe_text deepseek_v2 llama4 llama4_text"
    ),
    "layers without attention": "mamba mamba2 falcon_mamba jamba zamba2 rwkv recurrent_gemma",
    "interleaved rotation with other weights": "glm glm4 helium",
}
DIFFERENCES = {name: why for why, names in _OTHERS.items() for name in names.split()}
