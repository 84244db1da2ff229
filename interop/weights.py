"""Names of weights here and at Hugging Face: the one place that knows both.

Matrices are (out, in) on both sides, and Hugging Face's Llama pairs rotated features as our layout ``half``
does, so that names are all that differs. (Meta's own files and llama2.c pair neighbors, ``interleaved``;
Hugging Face's converter reorders the rows of wq and wk for that reason.)
"""

from __future__ import annotations

import re

from model import ModelSettings

LAYOUT = "half"  # of the rotated features in a Hugging Face Llama

OUTSIDE = {  # ours -> theirs
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_LAYER = {  # after layers.{i}. and model.layers.{i}.
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
# Buffers that old versions saved beside the weights; they follow from the config.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def theirs(settings: ModelSettings) -> dict[str, str]:
    """Every weight of a model, our name to Hugging Face's."""
    names = {
        ours: their
        for ours, their in OUTSIDE.items()
        if not (settings.tie_embeddings and ours == "head.weight")
    }
    for i in range(settings.layers):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{their}" for ours, their in IN_LAYER.items()}
    return names


def shapes(settings: ModelSettings, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shape every weight must have, by our name."""
    s = settings
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layer = {
        "attention_norm.weight": (s.dim,),
        "attention.wq.weight": (queries, s.dim),
        "attention.wk.weight": (keys, s.dim),
        "attention.wv.weight": (keys, s.dim),
        "attention.wo.weight": (s.dim, queries),
        "mlp_norm.weight": (s.dim,),
        "mlp.gate.weight": (s.ffn_dim, s.dim),
        "mlp.up.weight": (s.ffn_dim, s.dim),
        "mlp.down.weight": (s.dim, s.ffn_dim),
    }
    outside = {
        "embed.weight": (vocab_size, s.dim),
        "norm.weight": (s.dim,),
        "head.weight": (vocab_size, s.dim),
    }
    found = {}
    for name in theirs(s):
        found[name] = outside[name] if name in outside else layer[name.split(".", 2)[2]]
    return found
