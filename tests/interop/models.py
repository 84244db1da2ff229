"""Small models of every family, made by transformers, an independent implementation; all sizes
differ."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,  # not hidden_size / heads
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.5],
    "original_max_position_embeddings": 32,
}
ROPES = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, original length": {
        "rope_type": "dynamic",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {**LLAMA3, "rope_theta": 5000.0},
    "yarn": YARN,
    "yarn, all settings": {
        **YARN,
        "beta_fast": 6.0,
        "beta_slow": 0.7,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn, DeepSeek": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, no mscale_all_dim": {**YARN, "mscale": 0.7, "mscale_all_dim": 0},
    "yarn, no original length": {"rope_type": "yarn", "factor": 4.0},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 3.0},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.25},
}
ABSENT = object()  # a key that the configuration does not have
FULL = "full_attention"
SLIDING = "sliding_attention"
TYPES = [SLIDING, FULL, SLIDING, SLIDING, FULL]
CONVOLUTIONS = ["conv", FULL, "conv", "conv", FULL]
DELTAS = ["linear_attention", FULL, "linear_attention", "linear_attention", FULL]
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.4,
    },
}
LATENT = {
    "num_key_value_heads": 6,
    "head_dim": ABSENT,
    "q_lora_rank": 14,
    "kv_lora_rank": 11,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
MINICPM = {**LATENT, "v_head_dim": None, "scale_emb": 3, "dim_model_base": 10}
DEEPSEEK_YARN = {**YARN, "rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 0.8}
MAMBA = {
    "head_dim": ABSENT,
    "hidden_size": 48,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 7,
    "mamba_d_conv": 3,
}
GEMMA4 = {
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 12,
    "final_logit_softcapping": 4.0,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
        SLIDING: {"rope_type": "default", "rope_theta": 90.0},
    },
}
# Model type and configuration, by name. The first of each family is in the quick suite.
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one group": ("llama", {"num_key_value_heads": 1, "head_dim": 4}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}),
    "smollm3, list": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 9}),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}),
    "qwen2, full": ("qwen2", {"sliding_window": 9, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": TYPES}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 0.6,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 4.0],
            },
            "original_max_position_embeddings": 32,
            "head_dim": ABSENT,
            "hidden_size": 60,
        },
    ),
    "granite": ("granite", GRANITE),
    "granite_swa": (
        "granite_swa",
        {
            **GRANITE,
            "sliding_window": 9,
            "layer_rope_theta": [0, 500.0, 500.0, 90.0, 0],
            "layer_types": TYPES,
        },
    ),
    "granite_swa, plain": ("granite_swa", {**GRANITE, "sliding_window": 9}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 9,
            "layer_types": TYPES,
            "rope_parameters": {
                FULL: {**YARN, "rope_theta": 500.0},
                SLIDING: {"rope_type": "default", "rope_theta": 90.0},
            },
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 30,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                SLIDING: {"rope_type": "default", "rope_theta": 90.0},
            },
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING],
        },
    ),
    "gemma3_text, softcap": (
        "gemma3_text",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 10,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 4.0,
            "attention_bias": True,
        },
    ),
    "lfm2": (
        "lfm2",
        {"head_dim": ABSENT, "hidden_size": 60, "norm_eps": 1e-4, "layer_types": CONVOLUTIONS},
    ),
    "lfm2, biases": (
        "lfm2",
        {
            "head_dim": ABSENT,
            "hidden_size": 60,
            "conv_bias": True,
            "conv_L_cache": 4,
            "full_attn_idxs": [1],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **DELTA,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "layer_types": DELTAS,
        },
    ),
    "olmo_hybrid, rope": (
        "olmo_hybrid",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "attention_bias": True,
        },
    ),
    "minicpm3": ("minicpm3", MINICPM),
    "minicpm3, full queries": (
        "minicpm3",
        {
            **MINICPM,
            "q_lora_rank": None,
            "v_head_dim": 7,
            "scale_depth": None,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "youtu": ("youtu", {**LATENT, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 5}),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {
            **LATENT,
            "first_k_dense_replace": 5,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **LATENT,
            "q_lora_rank": None,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "mlp_layer_types": ["dense"] * 5,
            "layer_types": DELTAS,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **MAMBA,
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 41,
            "layer_types": DELTAS,
        },
    ),
    "granitemoehybrid, rope": (
        "granitemoehybrid",
        {
            **MAMBA,
            "mamba_conv_bias": False,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0},
            "layer_types": DELTAS,
        },
    ),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1, 4], "attention_bias": True}),
    "gemma4_text": ("gemma4_text", {**GEMMA4, "layer_types": TYPES}),
    "gemma4_text, k = v": (
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
    ),
    "qwen3_5_text": ("qwen3_5_text", {**DELTA, "layer_types": DELTAS}),
    "qwen3_5_text, one key head": (
        "qwen3_5_text",
        {**DELTA, "linear_num_key_heads": 1, "full_attention_interval": 2},
    ),
}
QUICK = [name for name in VARIANTS if "," not in name]


def make(model_type: str, **changes) -> PreTrainedModel:
    """Weights large enough for attention, norms, biases and sinks to matter, and norms that are not
    all 1."""
    keys = {key: value for key, value in (SMALL | changes).items() if value is not ABSENT}
    config = AutoConfig.for_model(model_type, **keys)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                # rounded, so that the sum of Gemma's weight and 1 is exact in float32
                weight.add_((0.3 * drawn * 2**12).round() / 2**12)
            else:
                weight.copy_(drawn if weight.ndim == 1 else 1.4 * drawn * weight.shape[1] ** -0.5)
        for name, weight in model.named_buffers():
            if "layer_scalar" in name:
                weight.fill_(float(1 + 0.3 * torch.randn(1, generator=generator)))
    return model


def variant(name: str, **changes) -> PreTrainedModel:
    model_type, keys = VARIANTS[name]
    return make(model_type, **(keys | changes))


@contextmanager
def double_precision() -> Iterator[None]:
    """transformers computes angles, norms and softmax in float32 whatever the dtype; its own code,
    built and run within this context, computes them in float64."""
    single = torch.float32
    method = torch.Tensor.float
    default = torch.get_default_dtype()
    try:
        torch.float = torch.float32 = torch.float64
        torch.Tensor.float = torch.Tensor.double
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.float = torch.float32 = single
        torch.Tensor.float = method
        torch.set_default_dtype(default)


def in_double(theirs: PreTrainedModel) -> PreTrainedModel:
    """The model, built in float64; call it within `double_precision`."""
    with double_precision():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(theirs.config), dtype=torch.float64)
    model.load_state_dict(theirs.state_dict())
    return model.eval()
