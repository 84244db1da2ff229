"""FIRE: a learned function of distance relative to the query position."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.biased import NAMESPACE
from model.attention.flex import LogitGradients
from model.attention.mask import AttentionView, BiasForms, BiasFunction, no_autocast, precise
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    SharableSettings,
)
from model.position.pairwise import pair_blocks, two_layers, two_layers_gradient
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

        The segment of x is the one at the start of its cell, which is 1/CELLS wide, or one or two
        segments later. With three edges in one cell, the bias may continue a neighboring segment
        within that cell. Intercepts and slopes have COPIES entries for each segment, which keys use
        in turn: gradients of neighboring keys are added to different entries.
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
                s = s + (edges[s] <= x)
            copy = j % COPIES
            return intercept[h, s, copy] + slope[h, s, copy] * x

        return bias

    def _has_pass(self, context: AttentionContext) -> bool:
        """Whether the bias gets its gradient in `fire_gradient`: distances follow from indices, and
        all rows have the same positions."""
        position = context.keys.position
        return (
            torch.is_grad_enabled()
            and context.queries.layout == "plain"
            and context.sinks == 0
            and context.keys.unit_steps
            and position.shape[0] == 1
            and not position.is_floating_point()
        )

    def _add_gradient(
        self,
        context: AttentionContext,
        out: Tensor,
        log: Tensor,
        view: AttentionView,
        v: Tensor,
        scale: float,
    ) -> Tensor:
        """See `BiasForms.add_gradient`."""
        return with_fire_gradient(
            out,
            log,
            view.q.to(v.dtype),
            view.k.to(v.dtype),
            v,
            self.near(torch.arange(context.keys.position_end, device=v.device)),
            self.far(context.queries.position[0]),
            precise(self.inner.weight),
            precise(self.inner.bias)[:, None],
            precise(self.outer.weight),
            view.mask.document,
            scale,
            view.mask.window,
        )

    def plan(self, context):
        q_position = context.q_position
        separation = context.separation()

        def bias(b, h, i, j):
            x = self.near(separation(b, i, j)) / self.far(q_position[b, i])
            return self.network(x, h.flatten())

        has_pass = self._has_pass(context)

        def make_flex() -> BiasFunction:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not has_pass):
                return self._flex_bias(context)

        forms = BiasForms(
            make_flex=make_flex,
            add_gradient=partial(self._add_gradient, context) if has_pass else None,
            # With more stages Triton buffers the look-ups of the next keys, in 475 kB of shared
            # memory.
            kernel_options={"num_stages": 1},
        )
        return AttentionPlan.from_mask(context.mask(bias=bias, forms=forms))


@torch.library.custom_op(f"{NAMESPACE}::with_fire_gradient", mutates_args=())
def with_fire_gradient(
    out: Tensor,
    log: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    far: Tensor,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    document: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """A copy of the output (B, H, T, E) of attention, from which FIRE gets its gradient.

    Args:
        log: (B, H, T) log-sum-exp of each query's logits.
        near: (N,) ψ(d).
        far: (T,) the divisor of each query.
        inner, bias, outer: (width, 1), (width, 1) and (H, width) of the network.
    """
    return out.clone()


@with_fire_gradient.register_fake
def _fake_with_fire_gradient(out, *more):
    return torch.empty_like(out)


@torch.library.custom_op(f"{NAMESPACE}::fire_gradient", mutates_args=())
def fire_gradient(
    grad: Tensor,
    out: Tensor,
    log: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    far: Tensor,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    document: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of near, far, inner, bias and outer, from that of the output."""
    logits = LogitGradients(grad, out, log, q, k, v, document, scale, window)
    nears = logits.by_distance(near[None])  # (1, L)
    hidden = torch.zeros_like(nears).masked_fill(logits.hidden, -math.inf)
    fars = F.pad(far, (0, logits.back), value=1.0)
    fars = fars.view(len(logits.q), -1).flip(0, 1)  # (n, b)
    of_nears = torch.zeros_like(nears)
    of_fars = torch.zeros_like(fars)
    of_weights = [torch.zeros_like(x) for x in (inner, bias, outer)]
    buffers: dict[torch.Size, Tensor] = {}
    with no_autocast(q):
        for part in logits.parts():
            divisor = fars[part.queries, :, None]
            x = logits.tile(nears, part)[0] / divisor  # (m, b, b)
            weights = (x.view(1, -1), inner, bias, outer)
            by_head = torch.cat(
                [
                    two_layers(weights[0][:, own], inner, bias, outer)
                    for own in pair_blocks(weights[0])
                ],
                dim=1,
            )
            f = by_head.view(-1, *x.shape).transpose(0, 1)  # (m, H, b, b)
            by_pair = logits.of(part, f + logits.tile(hidden, part), by_block=True)
            of_x, *more = two_layers_gradient(*weights, by_pair.transpose(0, 1).flatten(1))
            for total, gradient in zip(of_weights, more, strict=True):
                total += gradient
            of_dividend = of_x.view(x.shape) / divisor
            logits.add_diagonals(of_nears, of_dividend.sum(0, keepdim=True), part, buffers)
            of_fars[part.queries] -= (of_dividend * x).sum(-1)
    of_near = logits.of_distances(of_nears, len(near))[0]
    of_far = of_fars.flip(0, 1).flatten()[: len(far)].clone()
    of_inner, of_bias, of_outer = of_weights
    return of_near, of_far, of_inner, of_bias, of_outer


@fire_gradient.register_fake
def _fake_fire_gradient(
    grad, out, log, q, k, v, near, far, inner, bias, outer, document, scale, window
):
    return tuple(torch.empty_like(x) for x in (near, far, inner, bias, outer))


def _save_fire_inputs(ctx, inputs, output) -> None:
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors)
    ctx.sizes = scale, window


def _fire_backward(ctx, grad: Tensor):
    gradients = fire_gradient(grad.contiguous(), *ctx.saved_tensors, *ctx.sizes)
    return grad, None, None, None, None, *gradients, None, None, None


with_fire_gradient.register_autograd(_fire_backward, setup_context=_save_fire_inputs)
