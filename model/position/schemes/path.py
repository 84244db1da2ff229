"""PaTH attention: products of content-dependent Householder transformations along the path."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import AttentionView, QueryBlock, by_head, repeated
from model.position.content import (
    ContentSettings,
    causal_convolution,
    latest,
    linear,
    series_of,
    unit,
)
from model.position.interface import ContentScheme, constant, normal
from settings.fields import setting

CHUNK = 128  # keys per chunk; the cost of a pair is D + CHUNK


class PathSettings(ContentSettings):
    """Products of Householder-like matrices between query and key (PaTH, Yang et al. 2025)."""

    reads_between = True

    name: Literal["path"] = "path"
    rank: int = setting(32, "rank of the projection to directions w", ge=1)
    width: int = setting(3, "kernel size of the convolution, with the token itself", ge=2)


class PathAttention(ContentScheme):
    """logit = q_nᵀ H_n H_{n−1} ⋯ H_{m+1} k_m / √D, H_t = I − β_t w_t w_tᵀ, β_t = 2 σ(u_g·x_t +
    b_g).

    w_t = u_t / √(‖u_t‖² + 1e-6), u_t = silu(conv_3(W₂ W₁ x)), rank 32, for each key/value head.
    Yang et al. 2025, PaTH attention (arXiv:2505.16381), without the optional forgetting gate; the
    scale 1/√D multiplies the whole product, as in FLA's `naive_path_attn`. Tested against the
    explicit product; compared once with that function for the same w and β: outputs agree to 1e-6
    in float32. The computation of w is not compared with released code. Keys are cached unchanged;
    each pass computes the product by the UT transform, chunk by chunk, in time T·S·(D + chunk) and
    memory linear in S.
    """

    cached_form = "plain keys, directions w and strengths β"
    uses_position = False
    reads_features = True
    exempt: ClassVar[dict[str, str]] = {
        "window": "the product between two tokens depends on the tokens between them and, by "
        "convolution, "
        "on those just before"
    }
    projections = ("down", "strength")
    settings: PathSettings

    def setup(self):
        """Strengths β start near 1 (projections)."""
        groups = self.geometry.kv_heads
        dim = self.geometry.dim
        features = groups * self.geometry.head_dim
        self._kept = features + groups  # extras besides the history
        rank = self.settings.rank
        width = self.settings.width
        self.down = self.learned((rank, dim), normal(dim**-0.5))  # W₁
        self.up = self.learned((features, rank), normal(rank**-0.5))  # W₂
        self.conv = self.learned((features, width), normal(width**-0.5))
        self.strength = self.learned((groups, dim), normal(0.1 * dim**-0.5))  # u
        self.strength_bias = self.learned((groups,), constant(0.0))  # b

    def features(self, x, tables):
        """(B, T, G + rank): strengths, and W₁ x."""
        strength = 2 * linear(x, self.strength, self.strength_bias).sigmoid()
        return torch.cat([strength, linear(x, self.down)], dim=-1)

    def accumulate(self, features, past, new, tables):
        """Directions w, strengths and the history of the convolution."""
        groups = self.geometry.kv_heads
        strength, down = features.tensor_split([groups], dim=-1)
        before = latest(past)
        history = None if before is None else before[:, self._kept :]
        series, kept_history = series_of(down, history, self.settings.width)
        w = F.silu(causal_convolution(linear(series, self.up), self.conv, new.order))
        w = unit(w.unflatten(-1, (groups, -1))).flatten(2)
        return torch.cat([w, strength, kept_history], dim=-1)

    def read(self, q, k, own, extras, plan):
        groups = self.geometry.kv_heads
        w, strength = extras[..., : self._kept].tensor_split([-groups], dim=-1)
        w = by_head(w, groups)  # (B, G, S, D)
        strength = strength.transpose(1, 2)[..., None]  # (B, G, S, 1)

        def weights_fn(block: QueryBlock) -> Tensor:
            heads = plan.context.heads
            own_w = repeated(w[:, :, block.keys], heads).to(block.q.dtype)
            own_strength = repeated(strength[:, :, block.keys], heads).to(block.q.dtype)
            scores = along_paths(block, own_w, own_strength)
            return block.weights_of(scores * block.scale)

        return [AttentionView(q, k, plan.mask, weights_fn)]


def along_paths(block: QueryBlock, w: Tensor, strength: Tensor) -> Tensor:
    """(B, H, t, s) q_nᵀ H_n ⋯ H_{m+1} k_m of a block; w is (B, H, s, D), strength (B, H, s, 1).

    Iterates over chunks of keys from last to first. In each chunk, with M = strictLower(diag(β) W
    Wᵀ) and Y = (Q Wᵀ)(I + M)⁻¹ diag(β), the scores are Q Kᵀ − Y strictLower(W Kᵀ) and the queries
    become Q − Y W; Q Wᵀ is lower triangular among the queries' own tokens. Other documents and
    padding need no mask: the product between two tokens contains only the tokens between them.
    """
    q = block.q
    k = block.k
    keys = block.keys
    mask = block.mask
    assert isinstance(keys, slice)  # without sinks
    own = mask.keys - mask.queries + block.start - keys.start  # the first query's own token
    edges = [own, *range(own - CHUNK, 0, -CHUNK), 0] if own else [0]
    parts: list[Tensor] = []
    stop = own + q.shape[2]
    future = k.shape[2] - stop
    for start in edges:
        here = slice(start, stop)
        w_here = w[:, :, here]
        k_here = k[:, :, here]
        strengths = strength[:, :, here]
        met = q @ w_here.mT
        met = met.tril() if start == own else met
        system = (strengths * (w_here @ w_here.mT)).tril(-1)
        y = torch.linalg.solve_triangular(
            system,
            met,
            upper=False,
            left=False,
            unitriangular=True,
        )
        y = y * strengths.mT
        parts.insert(0, q @ k_here.mT - y @ (w_here @ k_here.mT).tril(-1))
        q = q - y @ w_here
        stop = start
    return F.pad(torch.cat(parts, dim=-1), (0, future))
