"""FIRE: a learned function of distance relative to the query position."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.mask import BiasForms, BiasFunction, no_autocast, precise
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    SharableSettings,
)
from model.position.pairwise import two_layers
from settings.fields import setting

COPIES = 32  # threads of a warp

CELLS = 4096  # a power of two, so that their starts are exact


class FireSettings(SharableSettings):
    """A small network of relative distance on a logarithmic scale (FIRE, or FIRE-S if shared; Li et
    al. 2023)."""

    test_time = SharableSettings.test_time | {"threshold"}

    name: Literal["fire"] = "fire"
    width: int = setting(32, "hidden units of the network", ge=1)
    init_length: float = setting(
        512.0,
        "initial threshold T: distances are divided by the query position, or by T below T",
        gt=0,
    )
    init_scale: float = setting(0.1, "initial value of the learned c in ln(1 + |c·x|)", gt=0)
    threshold: float | None = setting(None, "fixed T instead of the learned one", gt=0)


class Fire(PositionalScheme):
    """logit += f_h(ψ(d) / (ψ(max(n, T)) + ε)), after the 1/√D scale, n the query's position from 0.

    ψ(x) = ln(1 + |c·x|); f = Linear(1, width) → ReLU → Linear(width, H); c starts at 0.1, T =
    |m·512| with m from 1, both learned; ε = 1e-6. Li et al. 2023 (arXiv:2310.04418), section 3 and
    the listing of the appendix; layers use PyTorch's initialization. The listing's output bias is
    omitted, because the softmax cancels it. Logarithms and network run in float32 or float64.

    Beyond T the bias depends on n, not on distance alone, so positions must not be shifted.
    """

    exempt: ClassVar[dict[str, str]] = {
        "shift": "distances are divided by the query position beyond T"
    }
    epsilon: ClassVar[float] = 1e-6
    settings: FireSettings

    def setup(self):
        self.inner = nn.Linear(1, self.settings.width)
        self.outer = nn.Linear(
            self.settings.width,
            self.geometry.heads,
            bias=False,
        )
        self.c = nn.Parameter(torch.empty(1))
        self.multiplier = nn.Parameter(torch.empty(1))

    def initialize(self, generator, embedding_std):
        """Linear layers U(±1/√fan_in), as in PyTorch."""
        with torch.no_grad():
            for layer in (self.inner, self.outer):
                edge = layer.in_features**-0.5
                for weight in layer.parameters():
                    weight.copy_((2 * torch.rand(weight.shape, generator=generator) - 1) * edge)
            self.c.fill_(self.settings.init_scale)
            self.multiplier.fill_(1.0)

    def _threshold(self) -> Tensor:
        """(1,) T."""
        if self.settings.threshold is not None:
            # The learned parameter stays in the graph, so its gradient is 0 instead of None.
            return self.settings.threshold + 0 * precise(self.multiplier)
        return (precise(self.multiplier) * self.settings.init_length).abs()

    def _psi(self, x: Tensor) -> Tensor:
        """ln(1 + |c·x|)."""
        c = precise(self.c)
        return (c * x.to(c.dtype)).abs().log1p()

    def near(self, d: Tensor) -> Tensor:
        """ψ(d). Future keys are masked, but need a finite gradient."""
        return self._psi(d.clamp(min=0))

    def far(self, n: Tensor) -> Tensor:
        """ψ(max(n, T)) + ε."""
        threshold = self._threshold()
        return self._psi(torch.maximum(n.to(threshold.dtype), threshold)) + self.epsilon

    def network(self, x: Tensor, heads: Tensor) -> Tensor:
        """f_h(x) (R, H, t, s) for x (R, 1, t, s) in [0, 1] and the indices of heads (H,)."""
        bias = precise(self.inner.bias)[:, None]
        outer = precise(self.outer.weight)[heads]
        with no_autocast(x):
            out = two_layers(x.reshape(1, -1), precise(self.inner.weight), bias, outer)
        return out.view(-1, x.shape[0], *x.shape[2:]).transpose(0, 1)

    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """f as a piecewise linear function: f_h(x) = intercept[h, s] + slope[h, s]·x, s the number
        of `edges` at most x.

        Returns:
            edges (width + 2,) in ascending order, the last two infinite; intercept and slope (H,
            width + 1).
        """
        w1 = precise(self.inner.weight[:, 0])
        b1 = precise(self.inner.bias)
        w2 = precise(self.outer.weight)
        width = self.settings.width
        with torch.no_grad():
            # where units turn on or off
            edges, order = torch.where(w1 == 0, math.inf, -b1 / w1).sort()
            rank = order.argsort()[:, None]
            slopes = w1[:, None]
            # (width, width + 1)
            after = torch.arange(width + 1, device=w1.device) > rank
            active = torch.where(slopes > 0, after, ~after)
            active = torch.where(slopes == 0, b1[:, None] > 0, active).to(w1.dtype)
            edges = F.pad(edges, (0, 2), value=math.inf)
        with no_autocast(w1):
            return edges, (w2 * b1) @ active, (w2 * w1) @ active

    def _flex_bias(self, context: AttentionContext) -> BiasFunction:
        """The bias with table look-ups instead of a loop over the hidden units.

        The segment of x is that of the start of its cell, 1/CELLS wide, and one or two later. With
        three edges in one cell, the bias may continue a neighboring segment within that cell.
        Intercepts and slopes have COPIES entries for each segment, which keys use in turn:
        gradients of neighboring keys are added to different entries.
        """

        def copies(x: Tensor) -> Tensor:
            return x[..., None].expand(-1, -1, COPIES).contiguous()

        separation = context.separation()
        keys = context.keys
        far = self.far(context.queries.position).expand(context.batch, -1).contiguous()  # (B, T)
        edges, intercept, slope = self.segments()
        # (H, width + 1, COPIES)
        intercept = copies(intercept)
        slope = copies(slope)
        starts = torch.arange(CELLS + 1, device=context.device, dtype=edges.dtype) / CELLS
        first = torch.searchsorted(edges, starts, right=True, out_int32=True)  # (CELLS + 1,)
        real = keys.position.is_floating_point()
        near = None if real else self.near(torch.arange(keys.position_end, device=context.device))
        c = precise(self.c)

        def bias(b, h, i, j):
            d = separation(b, i, j).clamp(min=0)
            x = (c[b * 0] * d.to(c.dtype)).abs().log1p() if near is None else near[d]
            x = x / far[b, i]
            s = first[(x * CELLS).to(torch.int32).clamp(0, CELLS)]
            for _ in range(2):
                s = s + torch.where(edges[s] <= x, 1, 0)
            copy = j % COPIES
            return intercept[h, s, copy] + slope[h, s, copy] * x

        return bias

    def plan(self, context):
        q_position = context.q_position
        separation = context.separation()

        def bias(b, h, i, j):
            x = self.near(separation(b, i, j)) / self.far(q_position[b, i])
            return self.network(x, h.flatten())

        forms = BiasForms(
            make_flex=lambda: self._flex_bias(context),
            # With more stages Triton buffers the look-ups of the next keys, in 475 kB of shared
            # memory.
            kernel_options={"num_stages": 1},
        )
        return AttentionPlan.from_mask(context.mask(bias=bias, forms=forms))
