"""FoX: forgetting attention, a content-dependent decay between two tokens."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import AttentionMask, AttentionView, BiasForms, mask_dtype
from model.position.content import ContentSettings, latest, linear, running_sum
from model.position.interface import AttentionContext, ContentScheme, constant, normal
from model.position.schemes.alibi import alibi_slopes
from model.position.schemes.rope import Rope, RopeSettings, rotate
from settings.fields import setting


class FoxSettings(ContentSettings):
    """Forget gates computed from each token (FoX, Lin et al. 2025)."""

    test_time = ContentSettings.test_time | {"theta"}

    name: Literal["fox"] = "fox"
    gate: Literal["linear", "constant", "fixed"] = setting(
        "linear",
        "computed from each token; a learned constant per head, initialized as in "
        "ALiBi; or the fixed ALiBi slopes",
    )
    rotary: bool = setting(False, "also apply RoPE")
    theta: float = setting(10_000.0, "base of the RoPE frequencies with rotary", gt=1)


def parts(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Integer and fractional parts of float64 sums, so that float32 differences are exact to
    1e-7."""
    whole = sums.detach().floor()
    return whole.to(dtype), (sums - whole).to(dtype)


class Fox(ContentScheme):
    """logit += c_n − c_m, c_n = Σ_{t≤n} ln σ(w_h·x_t + β_h), after the 1/√D scale; 0 for n = m.

    Lin et al. 2025, forgetting transformer (arXiv:2503.02130); Cable (arXiv:2503.08067), whose gate
    is −softplus(w_h·x + β_h), is the same with w and β negated. A constant gate is ALiBi with slope
    −ln σ(β). One gate per query head; positions are used with `rotary` only. Tested against the
    formula in loops; compared once with FLA's `naive_forgetting_attn`: outputs agree to 1e-6 in
    float32, also with a window.
    """

    cached_form = "plain (or rotated) keys and cumulative log gates"
    projections = ("weight",)
    settings: FoxSettings

    def setup(self):
        """Linear gates start near σ(0) = ½; constant gates as in ALiBi, σ(β) = e^−slope."""
        heads = self.geometry.heads
        dim = self.geometry.dim
        slopes = alibi_slopes(heads)
        start = -slopes.expm1().log()
        self.weight = None
        self.bias = None
        if self.settings.gate == "linear":
            start = torch.zeros(heads)
            self.weight = self.learned((heads, dim), normal(0.1 * dim**-0.5))
        if self.settings.gate != "fixed":
            self.bias = self.learned((heads,), constant(start))
        rope = RopeSettings.model_validate({"theta": self.settings.theta})
        self._rope = Rope(rope, self.geometry) if self.settings.rotary else None
        self.constant_table(slopes)

    def tables(self, positions, dtype):
        """(H,) slopes of the fixed gate, and the rotation's cos and sin."""
        turns = () if self._rope is None else self._rope.tables(positions, dtype)
        return super().tables(positions, dtype) + turns

    def features(self, x, tables):
        """(B, T, H) log forget gates."""
        if self.weight is not None:
            return F.logsigmoid(linear(x, self.weight, self.bias))
        gate = -tables[0]
        if self.bias is not None:
            gate = F.logsigmoid(self.bias.to(x.dtype))
        return gate.expand(*x.shape[:2], -1)

    def accumulate(self, features, past, new, tables):
        # Cache the sum, not the gates: it suffices after eviction. In float64, because float32
        # cannot resolve single gates after 50,000 tokens.
        return running_sum(features.double(), latest(past), new)

    def write(self, k, extras, tables):
        return rotate(k, tables[1], tables[2]) if self.settings.rotary else k

    def read(self, q, k, own, extras, plan):
        context = plan.context
        if self.settings.rotary:
            _, cos, sin = context.tables
            q = rotate(q, context.of_queries(cos), context.of_queries(sin))
        return [AttentionView(q, k, self._mask(context, own, extras, mask_dtype(q)))]

    def _mask(
        self,
        context: AttentionContext,
        own: Tensor,
        extras: Tensor,
        dtype: torch.dtype,
    ) -> AttentionMask:
        sums = extras.transpose(1, 2)  # (B, H, S)
        k_whole, k_rest = parts(sums, dtype)
        q_whole, q_rest = parts(own.transpose(1, 2), dtype)
        if self.settings.sink_logit == "none":
            # A term of the query alone shifts all of its logits, which softmax ignores: its
            # gradient is 0.
            q_rest = q_rest.detach()

        def bias(b, h, i, j):
            whole = q_whole[b, h, i] - k_whole[b, h, j]
            return whole + (q_rest[b, h, i] - k_rest[b, h, j])

        return context.mask(bias=bias, forms=BiasForms(key_sums=sums), by_row=True)
