"""Weights of linear layers with the same input in one matrix, as single-token passes read them
fastest."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.block import Block


def joined_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """The weights of linear layers with the same input as one matrix (in, Σ out): that of
    `store_joined`, or a copy. Its rows are contiguous on a CPU; elsewhere its columns are."""
    stored = _stored_matrix(linears)
    if stored is not None:
        return stored
    weights = [linear.weight.detach() for linear in linears]
    if weights[0].device.type == "cpu":
        return torch.cat([weight.t() for weight in weights], dim=1).contiguous()
    return torch.cat(weights).t()


def store_joined(linears: Sequence[nn.Linear]) -> None:
    """Store the weights in the matrix of `joined_weight`, of which the layers' own become views.

    The layers keep their Parameter objects, whose values and shapes do not change, so there is no
    second copy, and weights loaded in place later are those of the matrix too. Weights that are
    stored so already keep their matrix, which models with the same parameters then share.
    """
    widths = [linear.out_features for linear in linears]
    parts = joined_weight(linears).split(widths, dim=1)
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part.t()


def _stored_matrix(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The matrix in which `store_joined` has stored these weights, or None."""
    first = linears[0].weight.detach()
    width = sum(linear.out_features for linear in linears)
    inputs = linears[0].in_features
    strides = (width, 1) if first.device.type == "cpu" else (1, inputs)
    matrix_of = first.untyped_storage()._cdata
    offset = first.storage_offset()
    for linear in linears:
        weight = linear.weight.detach().t()
        if weight.stride() != strides or weight.storage_offset() != offset:
            return None
        if weight.untyped_storage()._cdata != matrix_of:
            return None
        offset += linear.out_features * strides[1]
    return first.as_strided((inputs, width), strides)


def joined_layers(block: Block) -> list[list[nn.Linear]]:
    """The linear layers of a block with softmax attention, by input: of q, k and v, of the output,
    of gate and up, of down, and of the gate of attention if it has one."""
    attention = block.attention
    mlp = block.mlp
    groups = [
        [attention.wq, attention.wk, attention.wv],
        [attention.wo],
        [mlp.gate, mlp.up],
        [mlp.down],
    ]
    if attention.wg is not None:
        groups.append([attention.wg])
    return groups
