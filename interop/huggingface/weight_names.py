"""Names of weights here and in transformers, for import and export.

A weight map gives, for each module or parameter of transformers, the modules or parameters of ours
that it consists of, separated by spaces. Matrices are (out, in) on both sides. A tensor with
several parts is their concatenation along the first dimension, or along the first dimension of each
head (queries and gates of Qwen3.5). transformers' Llama pairs rotated features as our layout `half`
does; `to_half` converts the rows of queries and keys.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from model import Transformer
from model.mixers.recurrent import Recurrent

WeightMap = Mapping[str, str]  # the map of a layer


# The norms that multiply by 1 + weight in families with `one_plus_norms`.
_ONE_PLUS_NORM = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")
_CONVOLUTION = re.compile(r".*\.(conv(1d)?|canon[A-D])\.weight")  # (C, 1, W) in files
_FORGET_GATE = re.compile(r".*\.forget_gate\.A_log")  # (1, 1, H, 1) in transformers
# Buffers that old versions saved beside the weights; they follow from the config.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def by_part(state: Mapping[str, Tensor], model: Transformer) -> dict[str, Tensor]:
    """The weights, with the convolution of each recurrent layer split into views for queries, keys
    and values."""
    parts = dict(state)
    for i, block in enumerate(model.layers):
        for kind in ("weight", "bias") if isinstance(block.mixer, Recurrent) else ():
            prefix = f"layers.{i}.attention.convolution"
            whole = parts.pop(f"{prefix}.{kind}", None)
            if whole is not None:
                for letter, part in zip("qkv", whole.split(block.mixer.sizes), strict=True):
                    parts[f"{prefix}.{letter}.{kind}"] = part
    return parts


def weight_map(
    outer: WeightMap, layers: Sequence[WeightMap], ours: Iterable[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """The tensors of a whole model.

    Args:
        outer: the map of weights outside of layers.
        layers: the map of each layer.
        ours: the names of our model's weights; entries with other weights are left out.

    Returns:
        The names of our weights by the name of their tensor in transformers, and the names of our
            weights that are in no tensor.
    """
    have = set(ours)
    whole = dict(outer)
    for i, layer in enumerate(layers):
        # compressed queries have another name
        unused = "q_proj" if f"layers.{i}.attention.wq_down.weight" in have else "q_b_proj"
        for theirs, parts in layer.items():
            if theirs != f"self_attn.{unused}":
                named = " ".join(f"layers.{i}.{part}" for part in parts.split())
                whole[f"model.layers.{i}.{theirs}"] = named
    mapped = {}
    for theirs, parts in whole.items():
        for suffix in ("", ".weight", ".bias"):
            names = [part + suffix for part in parts.split()]
            if have.issuperset(names):
                mapped[theirs + suffix] = names
    return mapped, sorted(have.difference(*mapped.values()))


def joined(
    name: str,
    parts: Sequence[Tensor],
    heads: int,
    one_plus_norms: bool,
) -> Tensor:
    """A tensor of transformers from our weights; `separated` is the inverse."""
    if _has_gates(name, parts):
        by_head = [part.unflatten(0, (heads, -1)) for part in parts]
        return torch.cat(by_head, dim=1).flatten(0, 1)
    whole = torch.cat(list(parts))
    if _CONVOLUTION.fullmatch(name):
        return whole[:, None]
    if _FORGET_GATE.fullmatch(name):
        return whole.view(1, 1, -1, 1)
    return whole - 1 if one_plus_norms and _ONE_PLUS_NORM.fullmatch(name) else whole


def separated(
    name: str,
    whole: Tensor,
    rows: Sequence[int],
    heads: int,
    one_plus_norms: bool,
) -> Sequence[Tensor]:
    """Our weights, with these numbers of rows, from a tensor of transformers."""
    if _has_gates(name, rows):
        by_head = whole.unflatten(0, (heads, -1)).split([count // heads for count in rows], dim=1)
        return [part.flatten(0, 1) for part in by_head]
    if _CONVOLUTION.fullmatch(name):
        whole = whole[:, 0]
    if _FORGET_GATE.fullmatch(name):
        whole = whole.flatten()
    if one_plus_norms and _ONE_PLUS_NORM.fullmatch(name):
        whole = whole + 1
    return whole.split(list(rows))


def _has_gates(name: str, parts: Sequence) -> bool:
    return len(parts) == 2 and ".q_proj." in name


def to_half(rows: Tensor, heads: int, rotated: int, start: int = 0) -> Tensor:
    """Reorder the rows of queries or keys from layout `interleaved` to `half`.

    Args:
        rows: (heads·D, ...) weight or bias of a projection, or weight of a QK-norm over all heads;
            with heads = 1 the weight of a QK-norm of each head.
        rotated: the number of rotated features of each head.
        start: index of the first rotated feature.
    """
    features = rows.shape[0] // heads
    order = torch.arange(features)
    pairs = torch.arange(start, start + rotated).view(-1, 2)
    order[start : start + rotated] = pairs.T.flatten()
    return rows.unflatten(0, (heads, features))[:, order].flatten(0, 1)
