"""The model families of transformers that can be imported: their weights, defaults and differences.

A family states what its configuration class assumes for keys that a config.json leaves out
(transformers 5.23), because older versions of a config.json leave out many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from interop.huggingface.weight_names import GEMMA3, LLAMA, OLMO2, PHI3, QK_NORMS, SINKS, WeightMap


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: the class of the causal language model in transformers.
        layer: weight map of one layer.
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


_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
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
    ): "mixture of experts",
    ("deepseek_v2", "deepseek_v3", "minicpm3"): "multi-head latent attention",
    (
        "mamba",
        "mamba2",
        "falcon_mamba",
        "jamba",
        "bamba",
        "zamba2",
        "rwkv",
    ): "layers without attention",
    ("granitemoehybrid", "qwen3_next", "qwen3_5", "recurrent_gemma"): "layers without attention",
    ("llama4", "llama4_text"): "mixture of experts and chunked attention",
    ("glm", "glm4", "helium"): "interleaved rotation with other weights",
}
DIFFERENCES = {model_type: why for types, why in _OTHERS.items() for model_type in types}
