"""Names of weights here and in transformers, for import and export.

A weight map gives, for each tensor of transformers, our weights that it consists of. Matrices are
(out, in) on both sides; a tensor with several parts is their concatenation along the first
dimension (Phi-3), or that of each head (queries and gates of Qwen3.5). Names after `layers.{i}.`
and `model.layers.{i}.` are those of a layer. transformers' Llama pairs rotated features as our
layout `half` does; `to_half` converts the rows of queries and keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# a tensor of transformers -> our weights, concatenated along rows
WeightMap = dict[str, tuple[str, ...]]

OUTER: WeightMap = {
    "model.embed_tokens.weight": ("embed.weight",),
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
QWEN35: WeightMap = {
    **LLAMA,
    **QK_NORMS,
    "self_attn.q_proj.weight": ("attention.wq.weight", "attention.wg.weight"),
}
_NO_ATTENTION: WeightMap = {name: ours for name, ours in LLAMA.items() if "self_attn" not in name}
_DELTA: WeightMap = {
    **_NO_ATTENTION,
    "linear_attn.conv1d.weight": ("attention.convolution.weight",),
    "linear_attn.dt_bias": ("attention.decay_bias",),
    "linear_attn.A_log": ("attention.decay_rate",),
}
QWEN35_DELTA: WeightMap = {
    **_DELTA,
    "linear_attn.in_proj_qkv.weight": PHI3["self_attn.qkv_proj.weight"],
    "linear_attn.in_proj_z.weight": ("attention.w_gate.weight",),
    "linear_attn.in_proj_b.weight": ("attention.w_beta.weight",),
    "linear_attn.in_proj_a.weight": ("attention.w_decay.weight",),
    "linear_attn.norm.weight": ("attention.output_norm",),
    "linear_attn.out_proj.weight": ("attention.wo.weight",),
}
OLMO_HYBRID_DELTA: WeightMap = {
    **_DELTA,
    "linear_attn.q_proj.weight": ("attention.wq.weight",),
    "linear_attn.k_proj.weight": ("attention.wk.weight",),
    "linear_attn.v_proj.weight": ("attention.wv.weight",),
    "linear_attn.g_proj.weight": ("attention.w_gate.weight",),
    "linear_attn.b_proj.weight": ("attention.w_beta.weight",),
    "linear_attn.a_proj.weight": ("attention.w_decay.weight",),
    "linear_attn.o_norm.weight": ("attention.output_norm",),
    "linear_attn.o_proj.weight": ("attention.wo.weight",),
}
MINICPM3: WeightMap = {
    **_NO_ATTENTION,
    "self_attn.q_proj.weight": ("attention.wq.weight",),
    "self_attn.kv_a_proj_with_mqa.weight": ("attention.w_down.weight",),
    "self_attn.kv_a_layernorm.weight": ("attention.latent_norm.weight",),
    "self_attn.kv_b_proj.weight": ("attention.w_up.weight",),
    "self_attn.o_proj.weight": ("attention.wo.weight",),
}
MINICPM3_LOW_RANK: WeightMap = {
    **{name: ours for name, ours in MINICPM3.items() if "q_proj" not in name},
    "self_attn.q_a_proj.weight": ("attention.wq_down.weight",),
    "self_attn.q_a_layernorm.weight": ("attention.q_norm.weight",),
    "self_attn.q_b_proj.weight": ("attention.wq.weight",),
}
_LFM2_OTHERS: WeightMap = {
    "operator_norm.weight": ("attention_norm.weight",),
    "ffn_norm.weight": ("mlp_norm.weight",),
    "feed_forward.w1.weight": ("mlp.gate.weight",),
    "feed_forward.w3.weight": ("mlp.up.weight",),
    "feed_forward.w2.weight": ("mlp.down.weight",),
}
LFM2: WeightMap = {
    **_LFM2_OTHERS,
    "self_attn.q_proj.weight": ("attention.wq.weight",),
    "self_attn.k_proj.weight": ("attention.wk.weight",),
    "self_attn.v_proj.weight": ("attention.wv.weight",),
    "self_attn.out_proj.weight": ("attention.wo.weight",),
    "self_attn.q_layernorm.weight": ("attention.q_norm.weight",),
    "self_attn.k_layernorm.weight": ("attention.k_norm.weight",),
}
LFM2_CONVOLUTION: WeightMap = {
    **_LFM2_OTHERS,
    "conv.in_proj.weight": ("attention.w_in.weight",),
    "conv.in_proj.bias": ("attention.w_in.bias",),
    "conv.conv.weight": ("attention.convolution.weight",),
    "conv.conv.bias": ("attention.convolution.bias",),
    "conv.out_proj.weight": ("attention.wo.weight",),
    "conv.out_proj.bias": ("attention.wo.bias",),
}
SINKS: WeightMap = {"self_attn.sinks": ("attention.position.sink",)}

# The norms that multiply by 1 + weight in families with `one_plus_norms`.
ONE_PLUS_NORM = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")
CONVOLUTION = re.compile(r".*\.conv(1d)?\.weight")  # (C, 1, W) in transformers
# Buffers that old versions saved beside the weights; they follow from the config.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def weight_map(
    layers: Sequence[WeightMap],
    ours: Iterable[str],
    final_norm: str = "model.norm.weight",
) -> tuple[WeightMap, list[str]]:
    """The weight map of a whole model.

    Args:
        layers: the map of each layer.
        ours: the names of the weights that our model has; entries with other weights are left out.
        final_norm: the name of the last norm in transformers.

    Returns:
        The map, and those of our weights that it does not contain.
    """
    have = set(ours)
    whole = {**OUTER, final_norm: ("norm.weight",)}
    for i, layer in enumerate(layers):
        for theirs, parts in layer.items():
            whole[f"model.layers.{i}.{theirs}"] = tuple(f"layers.{i}.{part}" for part in parts)
    mapped = {theirs: parts for theirs, parts in whole.items() if have.issuperset(parts)}
    return mapped, sorted(have.difference(*mapped.values()))


def joined(
    name: str,
    parts: Sequence[Tensor],
    heads: int,
    one_plus_norms: bool,
) -> Tensor:
    """A tensor of transformers from our weights; `separated` is the inverse."""
    if len(parts) == 2 and ".q_proj." in name:
        by_head = [part.unflatten(0, (heads, -1)) for part in parts]
        return torch.cat(by_head, dim=1).flatten(0, 1)
    whole = torch.cat(list(parts))
    if CONVOLUTION.fullmatch(name):
        return whole[:, None]
    return whole - 1 if one_plus_norms and ONE_PLUS_NORM.fullmatch(name) else whole


def separated(
    name: str,
    whole: Tensor,
    rows: Sequence[int],
    heads: int,
    one_plus_norms: bool,
) -> Sequence[Tensor]:
    """Our weights, with these numbers of rows, from a tensor of transformers."""
    if len(rows) == 2 and ".q_proj." in name:
        by_head = whole.unflatten(0, (heads, -1)).split([count // heads for count in rows], dim=1)
        return [part.flatten(0, 1) for part in by_head]
    if CONVOLUTION.fullmatch(name):
        whole = whole[:, 0]
    if one_plus_norms and ONE_PLUS_NORM.fullmatch(name):
        whole = whole + 1
    return whole.split(list(rows))


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
