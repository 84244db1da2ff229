"""Latent attention (MLA): keys and values are expanded from one compressed vector per token.

DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3, MiniCPM3, Kimi Linear.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from errors import ModelError
from model.attention.mask import by_head
from model.mixers.mixer import LayerKind, MixerSettings
from model.mixers.softmax import HeadNorm, KeyMixer, ProjectedTokens
from model.position import SCHEMES
from settings.fields import setting


class LatentMixer(MixerSettings):
    """Latent attention. The queries and keys of each head have an unrotated part of their own, and
    a slice of `head_dim` features, whose keys all heads share; positional schemes act on the
    slice."""

    name: Literal["latent"] = "latent"
    rank: int = setting(64, "features of the compressed keys and values", ge=1)
    query_rank: int | None = setting(
        None,
        "features of compressed queries; null: queries are not compressed",
        ge=1,
    )
    unrotated_dim: int = setting(
        32,
        "features of each head's queries and keys without positions",
        ge=1,
    )
    value_dim: int | None = setting(
        None,
        "dimension of each head of values; null: unrotated_dim",
        ge=1,
    )
    norm_eps: float | None = setting(
        None,
        "epsilon of norms of compressed vectors; null: model.norm_eps",
        gt=0,
    )

    def describe(self):
        return f"latent attention of rank {self.rank}"


class LatentAttention(KeyMixer):
    """Softmax attention over q·k = u_qᵀ u_k + r_qᵀ r_k, with u_k and the values computed as W c
    from the compressed vector c, and the slice r with positions. The cache stores c and r_k, for
    all heads together.

    Expanded form: W c for all keys. Absorbed form: queries Wᵀ u_q are multiplied with c itself, and
    the values' part of W is applied to the mean of c. They are equal; the cheaper one is chosen.
    """

    mixer: LatentMixer

    def __init__(self, kind: LayerKind):
        super().__init__(kind)
        m = self.mixer
        self.value_dim = m.value_dim or m.unrotated_dim
        features = m.unrotated_dim + self.head_dim
        self.scale = features**-0.5
        self.pair_features = features + self.value_dim
        self.position = kind.modifiers()
        norm_eps = m.norm_eps or kind.norm_eps
        if m.query_rank is not None:
            self.wq_down = nn.Linear(kind.dim, m.query_rank, bias=False)
            self.q_norm = HeadNorm(m.query_rank, eps=norm_eps)
        self.wq = nn.Linear(m.query_rank or kind.dim, self.heads * features, bias=False)
        self.w_down = nn.Linear(kind.dim, m.rank + self.head_dim, bias=False)
        self.latent_norm = HeadNorm(m.rank, eps=norm_eps)
        self.w_up = nn.Linear(m.rank, self.heads * (m.unrotated_dim + self.value_dim), bias=False)
        self.wo = nn.Linear(self.heads * self.value_dim, kind.dim, bias=False)

    @classmethod
    def check(cls, where, kind, geometry):
        super().check(where, kind, geometry)
        if kind.kv_heads != 1:
            raise ModelError(
                f"kv_heads = {kind.kv_heads} is not supported by layers with mixer.name = latent, "
                "whose heads share one slice of the keys: set kv_heads to 1"
            )
        name = kind.position.name
        if SCHEMES[name][1].reads_features:
            raise ModelError(
                f"{where}: scheme '{name}' reads features of queries and keys, which are different "
                "in layers with mixer.name = latent; choose another scheme or mixer.name = "
                "attention"
            )
        if getattr(kind.position, "unscaled", False):
            raise ModelError(
                f"{where}.unscaled is not supported by layers with mixer.name = latent, where "
                f"'{name}' acts on a slice of queries and keys only: set it to false or choose "
                "mixer.name = attention"
            )
        if kind.position.shifted_keys:
            raise ModelError(
                f"{where}.shifted_keys is not supported by layers with mixer.name = latent: set it "
                "to 0 or choose mixer.name = attention"
            )

    def project(self, x, step, layer_cache):
        """Project the layer input x (B, T, C) to whole queries, the slice of new keys as it is
        cached (B, 1, T, D), and the compressed keys and values (B, 1, T, rank)."""
        plan = step.plan.bind(x, layer_cache)
        latent, rotated = self.w_down(x).split([self.mixer.rank, self.head_dim], dim=-1)
        read = step.context.of_queries(x)
        q = read if self.mixer.query_rank is None else self.q_norm(self.wq_down(read))
        return ProjectedTokens(
            plan,
            q=by_head(self.wq(q), self.heads),
            k=plan.write(rotated[:, None]),
            v=self.latent_norm(latent)[:, None],
        )

    def attend(self, x, step, own, k, v, hook=None):
        """The output (B, K, C) for the K queries of the pass, with the slices (B, 1, S, D) and
        compressed vectors (B, 1, S, rank) of all keys."""
        x = step.context.of_queries(x)
        if x.shape[1] == 0:  # the pass only fills the cache
            return x
        m = self.mixer
        q_unrotated, q = own.q.split([m.unrotated_dim, self.head_dim], dim=-1)
        up = self.w_up.weight.view(self.heads, -1, m.rank)
        up_keys, up_values = up.split([m.unrotated_dim, self.value_dim], dim=1)
        is_absorbed = hook is None and self.is_absorbed(q.shape[2], k.shape[2])
        if is_absorbed:
            q_unrotated = q_unrotated @ up_keys
            unrotated = values = v
        else:
            unrotated = v @ up_keys.mT
            values = v @ up_values.mT

        views = []
        for view in own.plan.read(q, k):
            whole_q = torch.cat([q_unrotated, view.q], dim=-1)
            whole_q = self.position.scale_queries(whole_q, step.factors, x)
            rotated_k = view.k.expand(-1, unrotated.shape[1], -1, -1)
            whole_k = torch.cat([unrotated, rotated_k], dim=-1)
            views.append(replace(view, q=whole_q, k=whole_k))
        out = self.weighted(views, values, hook)
        if is_absorbed:
            out = out @ up_values.mT
        return self.wo(out.transpose(1, 2).flatten(2))

    def is_absorbed(self, queries: int, keys: int) -> bool:
        """Whether the absorbed form needs fewer multiplications for these numbers of tokens."""
        rank = self.mixer.rank
        expanded = self.mixer.unrotated_dim + self.value_dim
        added_by_pairs = queries * keys * (2 * rank - expanded)
        saved_by_keys = (keys - queries) * rank * expanded
        return added_by_pairs < saved_by_keys

    def cached_numbers(self, tokens, key_features):
        return tokens * (key_features + self.mixer.rank)

    def workspace(self, batch, tokens, length, blocks):
        expanded = self.pair_features * (1 if blocks else 2)  # keys and values of every head
        shared = super().workspace(batch, tokens, length, blocks)
        return shared + batch * self.heads * length * expanded

    def saved_numbers(self, length):
        features = self.mixer.unrotated_dim + self.head_dim
        return 2 * self.heads * (2 * features + 2 * self.value_dim) + 2 * self.mixer.rank
