"""Names of weights here and in transformers, for import and export.

A weight map gives, for each tensor of transformers, our weights that it consists of. Matrices are
(out, in) on both sides; a tensor with several parts is their concatenation along the first
dimension (Phi-3). Names after `layers.{i}.` and `model.layers.{i}.` are those of a layer.
transformers' Llama pairs rotated features as our layout `half` does; `to_half` converts the rows of
queries and keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

# a tensor of transformers -> our weights, concatenated along rows
WeightMap = dict[str, tuple[str, ...]]

OUTER: WeightMap = {
    "model.embed_tokens.weight": ("embed.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("head.weight",),
}
LLAMA: WeightMap = {
    "input_layernorm.weight": ("attention_norm.weight",),
    "self_attn.q_proj.weight": ("attention.wq.weight",),
    "self_attn.k_proj.weight": ("attention.wk.weight",),
    "self_attn.v_proj.weight": ("attention.wv.weight",),
    "self_attn.o_proj.weight": ("attention.wo.weight",),
    "self_attn.q_proj.bias": ("attention.wq.bias",),
    "self_attn.k_proj.bias": ("attention.wk.bias",),
    "self_attn.v_proj.bias": ("attention.wv.bias",),
    "self_attn.o_proj.bias": ("attention.wo.bias",),
    "post_attention_layernorm.weight": ("mlp_norm.weight",),
    "mlp.gate_proj.weight": ("mlp.gate.weight",),
    "mlp.up_proj.weight": ("mlp.up.weight",),
    "mlp.down_proj.weight": ("mlp.down.weight",),
    "mlp.gate_proj.bias": ("mlp.gate.bias",),
    "mlp.up_proj.bias": ("mlp.up.bias",),
    "mlp.down_proj.bias": ("mlp.down.bias",),
}
QK_NORMS: WeightMap = {
    "self_attn.q_norm.weight": ("attention.q_norm.weight",),
    "self_attn.k_norm.weight": ("attention.k_norm.weight",),
}
OLMO2: WeightMap = {
    **{name: ours for name, ours in LLAMA.items() if "layernorm" not in name},
    **QK_NORMS,
    "post_attention_layernorm.weight": ("attention_norm.weight",),
    "post_feedforward_layernorm.weight": ("mlp_norm.weight",),
}
GEMMA3: WeightMap = {
    **LLAMA,
    **QK_NORMS,
    "post_attention_layernorm.weight": ("attention_output_norm.weight",),
    "pre_feedforward_layernorm.weight": ("mlp_norm.weight",),
    "post_feedforward_layernorm.weight": ("mlp_output_norm.weight",),
}
PHI3: WeightMap = {
    "input_layernorm.weight": ("attention_norm.weight",),
    "self_attn.qkv_proj.weight": (
        "attention.wq.weight",
        "attention.wk.weight",
        "attention.wv.weight",
    ),
    "self_attn.o_proj.weight": ("attention.wo.weight",),
    "post_attention_layernorm.weight": ("mlp_norm.weight",),
    "mlp.gate_up_proj.weight": ("mlp.gate.weight", "mlp.up.weight"),
    "mlp.down_proj.weight": ("mlp.down.weight",),
}
SINKS: WeightMap = {"self_attn.sinks": ("attention.position.sink",)}

# The norms that multiply by 1 + weight in families with `one_plus_norms`.
ONE_PLUS_NORM = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")
# Buffers that old versions saved beside the weights; they follow from the config.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def weight_map(
    layer: WeightMap,
    layers: int,
    ours: Iterable[str],
) -> tuple[WeightMap, list[str]]:
    """The weight map of a whole model.

    Args:
        layer: the map of one layer of the family.
        layers: the number of layers.
        ours: the names of the weights that our model has; entries with other weights are left out.

    Returns:
        The map, and those of our weights that it does not contain.
    """
    have = set(ours)
    whole = dict(OUTER)
    for i in range(layers):
        for theirs, parts in layer.items():
            whole[f"model.layers.{i}.{theirs}"] = tuple(f"layers.{i}.{part}" for part in parts)
    mapped = {theirs: parts for theirs, parts in whole.items() if have.issuperset(parts)}
    return mapped, sorted(have.difference(*mapped.values()))


def to_half(rows: Tensor, heads: int, rotated: int) -> Tensor:
    """Reorder the rows of queries or keys from layout `interleaved` to `half`.

    Args:
        rows: (heads·D, ...) weight or bias of a projection, or weight of a QK-norm over all heads;
            with heads = 1 the weight of a QK-norm of each head.
        rotated: the number of rotated features at the start of each head.
    """
    features = rows.shape[0] // heads
    order = torch.arange(rotated).view(-1, 2).T.flatten()
    order = torch.cat([order, torch.arange(rotated, features)])
    return rows.unflatten(0, (heads, features))[:, order].flatten(0, 1)
