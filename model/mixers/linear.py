"""Linear attention with positions: a token mixer whose cache is a sum over past tokens.

The weights are products of features, w(n, m) = a(q_n)·b(k_m), so the sums Σ b(k_m) v_mᵀ over past
tokens replace the keys: the recurrence of `model/mixers/recurrence.py` without decay. Schemes can
change token embeddings, queries and keys, but not logits.

Su 2021 (kexue.fm/archives/8265, archives/8338); the feature elu + 1: Katharopoulos et al. 2020
(arXiv:2006.16236).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import mask_dtype, no_autocast
from model.mixers.mixer import AttentionPass, MixerSettings
from model.mixers.recurrence import GatheredState, Inputs, LayerState, recurrent_outputs
from model.mixers.softmax import Projection
from settings.fields import setting


class LinearMixer(MixerSettings):
    """Linear attention: constant cost and memory per token, with sums instead of cached keys (Su
    2021)."""

    name: Literal["linear"] = "linear"
    form: Literal["numerator", "cosine"] = setting(
        "numerator",
        "weights φ(q)·φ(k) with φ = elu + 1, positions in the numerator only; or 1 + cos(q, k)",
    )
    chunk: int = setting(64, "tokens per chunk; does not change the result", ge=1)

    def describe(self):
        return f"linear attention ({self.form})"


class LinearAttention(Projection):
    """Attention whose weights are products of features; R is the scheme's map of queries and keys.

    ``numerator``: o_n = Σ_m (R_n φ(q_n))·(R_m φ(k_m)) v_m / Σ_m φ(q_n)·φ(k_m) with φ = elu + 1.
    Rotated weights can be negative and sum to zero, so the denominator uses unrotated features and
    is positive. ``cosine``: weights 1 + (R_n q̂_n)·(R_m k̂_m) of unit vectors, divided by their
    sum. Vectors are normalized again after the scheme, so weights are nonnegative and an amplitude
    (as in YaRN) has no effect. Runs in float32, or in float64 for float64 models.
    """

    mixer: LinearMixer

    def forward(self, x, step, layer_cache):
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        context = step.context
        bound = step.plan.bind(x, None)
        read = context.of_queries(x)
        q = self.normalized(self.q_norm, self.wq(read))
        k = self.normalized(self.k_norm, self.wk(x))
        v = self.v_norm(self.split(self.wv(x)))
        with no_autocast(x):
            dtype = mask_dtype(v)
            feature = unit_norm if self.mixer.form == "cosine" else positive
            q = feature(q.to(dtype))
            k = feature(k.to(dtype))
            values = v.to(dtype)
            (view,) = bound.read(q, bound.write(k))
            ones = values.new_ones(*values.shape[:3], 1)
            if self.mixer.form == "cosine":
                # Normalize again: an amplitude or a mixture of frequencies could make weights
                # negative. The first feature adds 1 to the products.
                q = F.pad(unit_norm(view.q), (1, 0), value=1.0)
                k = F.pad(unit_norm(view.k), (1, 0), value=1.0)
                values = torch.cat([values, ones], dim=-1)
                summed = self._sums(q, k, values, step, layer_cache)
                out, total = summed.split([self.head_dim, 1], dim=-1)
            else:
                # denominators as further heads, whose values are 1
                ones = F.pad(ones, (0, self.head_dim - 1))
                summed = self._sums(
                    torch.cat([view.q, q], dim=1),
                    torch.cat([view.k, k], dim=1),
                    torch.cat([values, ones], dim=1),
                    step,
                    layer_cache,
                )
                out, total = summed.chunk(2, dim=1)
                total = total[..., :1]
            out = out / total.masked_fill(total == 0, 1.0)  # padding attends to no token
        return self.joined(out.to(v.dtype), read)

    def _sums(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: AttentionPass,
        layer_cache: LayerState | GatheredState | None,
    ) -> Tensor:
        """Σ_m (q_n·k_m) v_m over the visible tokens m of the K queries q (·, ·, K, E)."""
        shared = self.heads // self.kv_heads
        early = k.shape[2] - q.shape[2]  # tokens without queries
        inputs = Inputs(
            q=F.pad(q, (0, 0, early, 0)),
            k=k.repeat_interleave(shared, dim=1),
            v=v.repeat_interleave(shared, dim=1),
            beta=q.new_ones(()).expand(*q.shape[:2], k.shape[2]),
            log_decay=None,
            is_delta=False,
            document=step.context.documents,
        )
        return recurrent_outputs(inputs, layer_cache, self.mixer.chunk)[:, :, early:]

    def pair_flops(self, length):
        """Training FLOPs per token without the projections: pairs within a chunk, and updates of
        the sums."""
        pairs = (min(self.mixer.chunk, length) + 1) / 2
        return 12 * self.heads * self.head_dim * (pairs + self.head_dim)

    def cached_numbers(self, tokens, key_features):
        if self.mixer.form == "cosine":
            return self.heads * (self.head_dim + 1) ** 2
        return 2 * self.heads * self.head_dim**2

    def workspace(self, batch, tokens, length, blocks):
        chunk = min(self.mixer.chunk, tokens)
        per_token = 4 * self.heads * (chunk + 2 * self.head_dim)
        states = (tokens // chunk + 2) * self.cached_numbers(tokens, self.head_dim)
        return batch * (tokens * per_token + 2 * states)

    def saved_numbers(self, length):
        return self.workspace(1, length, length, 0) // length


def unit_norm(x: Tensor) -> Tensor:
    """x / |x|."""
    return F.normalize(x, dim=-1)


def positive(x: Tensor) -> Tensor:
    """elu(x) + 1 without cancellation, which would return 0 in float32 for x below −17."""
    return x.relu() + x.clamp(max=0).exp()
