"""Scores of schemes in which each feature decays along the sequence at its own rate."""

import math

import torch
from torch import Tensor

from model.attention.mask import QueryBlock, joined

QUERIES = 16  # block size for pairwise scores: QUERIES² · D numbers per head


def decayed_scores(
    block: QueryBlock,
    q_decay: Tensor,
    k_decay: Tensor,
) -> Tensor:
    """(B, H, t, s) Σ_c q_c k_c e^(P_c − P'_c) for visible pairs; any finite number for masked ones.

    No factor exceeds 1 if P does not increase along a document. For keys before its block of 16, a
    query uses e^(P − P0) and a key e^(P0 − P'), where P0 is that of the block's first query that
    attends to such keys: a factor underflows only if the score does. Keys inside the block are
    computed pair by pair.

    Args:
        block: its last keys are those of its queries; with all keys, those at the queries' index.
        q_decay: P, the logarithm of the decay up to each query, (B or 1, H or 1, t, D).
        k_decay: P' of the keys, (B or 1, H or 1, s, D).
    """
    queries = q_decay.shape[2]
    keys = k_decay.shape[2]
    visible = block.visible  # (R, 1, t, s)
    # Queries are the last tokens of the pass, and a band's keys end with the block's queries.
    whole = block.mask.keys - block.mask.queries + block.start
    own = whole if keys == block.mask.keys else keys - queries
    rows = []
    for start in range(0, queries, QUERIES):
        here = slice(start, min(start + QUERIES, queries))
        near = slice(own + here.start, own + here.stop)
        far = slice(0, near.start)
        q = block.q[:, :, here]
        q_log = q_decay[:, :, here]
        seen = visible[:, :, here]
        parts = []
        if near.start > 0:
            parts.append(
                _far(
                    q,
                    block.k[:, :, far],
                    q_log,
                    k_decay[:, :, far],
                    seen[..., far],
                )
            )
        parts.append(
            _near(
                q,
                block.k[:, :, near],
                q_log,
                k_decay[:, :, near],
                seen[..., near],
            )
        )
        if near.stop < keys:  # the future
            parts.append(q.new_zeros(*q.shape[:3], keys - near.stop))
        rows.append(torch.cat(parts, dim=-1))
    return joined(rows, 2)


def _near(
    q: Tensor,
    k: Tensor,
    q_decay: Tensor,
    k_decay: Tensor,
    visible: Tensor,
) -> Tensor:
    """Scores pair by pair. Masked pairs, which can have any difference, use 0."""
    difference = q_decay[:, :, :, None] - k_decay[:, :, None]  # (B or 1, H or 1, t, s, D)
    decay = torch.where(visible[..., None], difference, 0.0).to(q.dtype).exp()
    return torch.einsum("bhtsc,bhsc->bhts", q[:, :, :, None] * decay, k)


def _far(
    q: Tensor,
    k: Tensor,
    q_decay: Tensor,
    k_decay: Tensor,
    visible: Tensor,
) -> Tensor:
    """Scores with keys before all queries, relative to the first query that attends to any of them.

    Queries without such keys (their document starts in this block) and keys without queries (their
    document has ended) do not affect the base and get the factor 1.
    """
    has_keys = visible.any(3)[..., None]  # (R, 1, t, 1)
    has_queries = visible.any(2)[..., None]  # (R, 1, s, 1)
    base = torch.where(has_keys, q_decay, -math.inf).amax(2, keepdim=True)
    base = base.nan_to_num(neginf=0.0).detach()  # it cancels, also in the gradients
    q = q * torch.where(has_keys, q_decay - base, 0.0).to(q.dtype).exp()
    k = k * torch.where(has_queries, base - k_decay, 0.0).to(k.dtype).exp()
    return q @ k.transpose(-1, -2)
