"""FIRE: a learned function of distance relative to the query position."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from model.attention.mask import precise
from model.position.base import AttentionContext, AttentionPlan, PositionalScheme, SharableSettings
from model.position.pairwise import over_pairs


class FireSettings(SharableSettings):
    """A small network of relative distance on a logarithmic scale (FIRE, or FIRE-S if shared; Li et al.
    2023)."""

    test_time = SharableSettings.test_time | {"threshold"}

    name: Literal["fire"] = "fire"
    width: int = Field(32, ge=1, description="hidden units of the network")
    init_length: float = Field(
        512.0,
        gt=0,
        allow_inf_nan=False,
        description="initial threshold T: distances are divided by the query position, or by T below T",
    )
    init_scale: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="initial value of the learned c in ln(1 + |c·x|)"
    )
    threshold: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="fixed T instead of the learned one"
    )


class Fire(PositionalScheme):
    """logit += f_h(ψ(d) / (ψ(max(n, T)) + ε)), after the 1/√D scale, n the query's position from 0.

    ψ(x) = ln(1 + |c·x|); f = Linear(1, width) → ReLU → Linear(width, H); c starts at 0.1, T = |m·512| with m
    from 1, both learned; ε = 1e-6. Li et al. 2023 (arXiv:2310.04418), section 3 and the listing of the
    appendix; layers use PyTorch's initialization. The listing's output bias is omitted, because the softmax
    cancels it. Logarithms and network run in float32 or float64.

    Beyond T the bias depends on n, not on distance alone, so positions must not be shifted.
    """

    exempt: ClassVar[dict[str, str]] = {"shift": "distances are divided by the query position beyond T"}
    epsilon: ClassVar[float] = 1e-6
    settings: FireSettings

    def setup(self) -> None:
        self.inner = nn.Linear(1, self.settings.width)
        self.outer = nn.Linear(self.settings.width, self.geometry.heads, bias=False)
        self.c, self.multiplier = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def initialize(self, generator: torch.Generator, embedding_std: float) -> None:
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

    def argument(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """(n, d, zero) -> the input of f, in [0, 1] for 0 ≤ d ≤ n; `zero` is an index tensor of 0."""
        c, threshold = precise(self.c), self._threshold()

        def argument(n: Tensor, d: Tensor, zero: Tensor) -> Tensor:
            scale, edge = c[zero], threshold[zero]
            # Future keys are masked, but need a finite gradient.
            near = (scale * d.clamp(min=0).to(c.dtype)).abs().log1p()
            far = (scale * torch.maximum(n.to(c.dtype), edge)).abs().log1p()
            return near / (far + self.epsilon)

        return argument

    def network(self) -> Callable[[Tensor, Tensor], Tensor]:
        """(h, x) -> f_h(x) (R, H, t, s), x (R, 1, t, s) and h (1, H, 1, 1); or both scalars."""
        w1, b1, w2 = (precise(p) for p in (self.inner.weight, self.inner.bias, self.outer.weight))
        first, second, width = w1.flatten(), w2.flatten(), self.settings.width

        def network(h: Tensor, x: Tensor) -> Tensor:
            if h.ndim:  # evaluate the hidden layer once for all heads
                with torch.autocast(x.device.type, enabled=False):
                    of_heads = w2[h.flatten()]
                    out = over_pairs(
                        lambda x: of_heads @ torch.addmm(b1[:, None], w1, x).relu_(),
                        len(of_heads),
                        x.reshape(1, -1),
                    )
                    return out.view(-1, x.shape[0], *x.shape[2:]).transpose(0, 1)
            out = x * 0
            for unit in range(width):  # FlexAttention supports scalar arithmetic only
                k = h * 0 + unit
                out = out + second[h * width + k] * (first[k] * x + b1[k]).relu()
            return out

        return network

    def plan(self, context: AttentionContext) -> AttentionPlan:
        q_position, k_position = context.q_position, context.k_position
        argument, network = self.argument(), self.network()

        def bias(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            n = q_position[b, i]
            zero = b * 0
            return network(h, argument(n, n - k_position[b, j], zero))

        return AttentionPlan.from_mask(context.mask(bias=bias))
