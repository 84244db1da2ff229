"""The architectures of llama.cpp that can be read: tensor names, row order and what they compute.

llama.cpp rotates adjacent features of queries and keys in most architectures, as Meta's Llama does, while
transformers' classes pair feature k with k + D/2; the rows of such files are permuted.
"""

from __future__ import annotations

from dataclasses import dataclass

# Names in a GGUF file -> names in transformers; those of a layer follow `blk.{i}.` and `model.layers.{i}.`.
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
}
QK_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
PHI3 = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",  # gate and up, in this order
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Divisors of the rotary frequencies: metadata in the form of tensors.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_SHORT = "rope_factors_short.weight"
PERMUTED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`.

    Attributes:
        model_type: the model in transformers that computes the same.
        layer: names of a layer's tensors.
        permuted: whether adjacent features of queries and keys are rotated.
        frequency_divisors: whether the file may contain divisors of the rotary frequencies.
        alibi: whether the positions are ALiBi's, with geometric slopes, instead of rotations.
    """

    model_type: str
    layer: dict[str, str]
    permuted: bool
    frequency_divisors: bool = True
    alibi: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", LAYER, permuted=True),
    "refact": Architecture("llama", LAYER, permuted=False, frequency_divisors=False, alibi=True),
    "smollm3": Architecture("smollm3", LAYER, permuted=True, frequency_divisors=False),
    "mistral3": Architecture("ministral3", LAYER, permuted=True),
    "qwen2": Architecture("qwen2", LAYER, permuted=False, frequency_divisors=False),
    "qwen3": Architecture("qwen3", LAYER | QK_NORMS, permuted=False, frequency_divisors=False),
    "phi3": Architecture("phi3", PHI3, permuted=False),
    "granite": Architecture("granite", LAYER, permuted=True),
    "granite_swa": Architecture(
        "granite_swa", LAYER | {"attn_sinks.weight": "self_attn.sinks"}, permuted=True
    ),
}


def names(architecture: Architecture, layers: int) -> dict[str, str]:
    """Every tensor that a file of this architecture may contain, and its name in transformers."""
    found = dict(OUTER)
    for i in range(layers):
        for name, their in architecture.layer.items():
            found[f"blk.{i}.{name}"] = f"model.layers.{i}.{their}"
    return found


def rotated_heads(architecture: Architecture, name: str, heads: int, kv_heads: int) -> int:
    """The number of heads in the rows of a tensor whose rows are permuted; 0 for other tensors."""
    inner = name.split(".", 2)[2] if name.startswith("blk.") else ""
    if not architecture.permuted or inner not in PERMUTED:
        return 0
    return heads if inner.startswith("attn_q.") else kv_heads
