"""The model families of transformers that can be imported: their weights, defaults and differences.

A family states what its configuration class assumes for keys that a config.json leaves out
(transformers 5.23), because older versions of a config.json leave out many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from interop.huggingface.weight_names import (
    GEMMA3,
    LFM2,
    LFM2_CONVOLUTION,
    LLAMA,
    MINICPM3,
    MINICPM3_LOW_RANK,
    OLMO2,
    OLMO_HYBRID_DELTA,
    PHI3,
    QK_NORMS,
    QWEN35,
    QWEN35_DELTA,
    SINKS,
    WeightMap,
    weight_map,
)
from model import ModelSettings


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: the class of the causal language model in transformers.
        layer: weight map of one layer.
        other_layer: weight map of layers with convolutions or states, or compressed queries.
        other_type: the name of such layers in `layer_types`.
        final_norm: the name of the last norm.
        defaults: values of absent keys, where they are not those of Llama. A key that changes the
            result and is not listed is not part of the family.
        settings: model settings that all models of the family share.
        partial: whether `partial_rotary_factor` is supported.
        one_plus_norms: whether norms multiply by 1 + weight.
    """

    architecture: str
    layer: WeightMap
    defaults: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    partial: bool = False
    one_plus_norms: bool = False
    other_layer: WeightMap = field(default_factory=dict)
    other_type: str | None = None
    final_norm: str = "model.norm.weight"

    def weight_map(
        self, settings: ModelSettings, ours: Iterable[str]
    ) -> tuple[WeightMap, list[str]]:
        """The weight map of a whole model; see `weight_map`."""
        layers = []
        for name in settings.layer_kinds:
            mixer = settings.resolved_kinds[name].mixer
            is_other = getattr(mixer, "query_rank", mixer.name not in ("attention", "latent"))
            layers.append(self.other_layer if is_other else self.layer)
        return weight_map(layers, ours, self.final_norm)


_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DELTA_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", LLAMA, defaults=_BIASES),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        LLAMA,
        defaults={
            **_BIASES,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
        },
    ),
    "mistral": Family(
        "MistralForCausalLM", LLAMA, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        LLAMA,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": _MINISTRAL_ROPE,
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        LLAMA,
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOWS},
        settings={"attention_bias": "qkv"},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        LLAMA | QK_NORMS,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
            **_QWEN_WINDOWS,
        },
        settings={"qk_norm": True},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        PHI3,
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
        },
        partial=True,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        LLAMA,
        defaults=_BIASES | _MULTIPLIERS,
    ),
    "granite_swa": Family(
        "GraniteSWAForCausalLM",
        LLAMA | SINKS,
        defaults={
            **_BIASES,
            **_MULTIPLIERS,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        OLMO2,
        defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
        settings={"qk_norm": "all_heads", "norm_placement": "output"},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        OLMO2,
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "sliding_window": 4096,
            "rope_theta": 500_000.0,
        },
        settings={"qk_norm": "all_heads", "norm_placement": "output"},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA3,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        settings={"qk_norm": True, "norm_placement": "both", "activation": "gelu_tanh"},
        one_plus_norms=True,
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        LFM2,
        other_layer=LFM2_CONVOLUTION,
        other_type="conv",
        final_norm="model.embedding_norm.weight",
        defaults={
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
        settings={"qk_norm": True},
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        OLMO2,
        other_layer=OLMO_HYBRID_DELTA,
        other_type="linear_attention",
        defaults={
            "attention_bias": False,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        settings={"qk_norm": "all_heads", "norm_placement": "output"},
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        MINICPM3,
        other_layer=MINICPM3_LOW_RANK,
        defaults={
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        settings={"kv_heads": 1},
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        QWEN35,
        other_layer=QWEN35_DELTA,
        other_type="linear_attention",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            **_DELTA_SIZES,
        },
        settings={"qk_norm": True, "gate": "channel"},
        partial=True,
        one_plus_norms=True,
    ),
}

# What other families compute that our decoder does not, for the error message.
_OTHERS: dict[tuple[str, ...], str] = {
    ("gpt2", "gpt_bigcode", "opt", "bloom", "mpt"): "LayerNorm and an MLP without a gate",
    (
        "gpt_neox",
        "gptj",
        "gpt_neo",
        "phi",
        "stablelm",
        "falcon",
        "codegen",
    ): "LayerNorm and parallel blocks",
    ("gemma", "gemma2"): "blocks that differ from Gemma 3's",
    ("gemma3",): "images; save its language model as gemma3_text",
    ("gemma4", "gemma4_text"): "per-layer inputs, and keys and values shared by layers",
    ("olmo", "cohere", "cohere2", "starcoder2", "persimmon", "nemotron"): "LayerNorm",
    (
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "granitemoe",
        "olmoe",
        "phimoe",
        "gpt_oss",
        "lfm2_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    ): "mixture of experts",
    ("deepseek_v2", "deepseek_v3", "kimi_linear"): "mixture of experts",
    (
        "mamba",
        "falcon_mamba",
        "jamba",
        "zamba2",
        "rwkv",
    ): "layers without attention",
    ("mamba2", "bamba", "granitemoehybrid"): "Mamba-2 layers",
    ("recurrent_gemma",): "layers without attention",
    ("qwen3_5",): "images; save its language model as qwen3_5_text",
    ("llama4", "llama4_text"): "mixture of experts and chunked attention",
    ("glm", "glm4", "helium"): "interleaved rotation with other weights",
}
DIFFERENCES = {model_type: why for types, why in _OTHERS.items() for model_type in types}
