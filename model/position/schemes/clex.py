"""CLEX: rotary frequencies that a small differential equation moves as the length grows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from errors import ModelError
from model.attention.mask import mask_dtype, no_autocast
from model.position.interface import PositionalScheme, constant, uniform
from model.position.scaling import plain_frequencies
from model.position.schemes.learned_rope import from_the_middle, turns_at
from model.position.schemes.rope import RotationSettings, check_even, rotation_plan
from model.position.table import Constant, on_device
from settings.fields import setting


class ClexSettings(RotationSettings):
    """Rotary positions whose frequencies a learned differential equation scales (CLEX, Chen et al.
    2024)."""

    name: Literal["clex"] = "clex"
    max_factor: int = setting(16, "largest t; longer sequences use its frequencies", ge=1)
    width: int = setting(1, "hidden features of the network, as a multiple of D", ge=1)
    step: float = setting(0.1, "step of the integration in t", gt=0, le=1)


class Clex(PositionalScheme):
    """RoPE with frequencies e^z(t), t = ⌈L/L0⌉, z(1) = ln b^(−2k/D) and dz/dt = dn/dt + W₂ tanh(W₁
    (z + n)), where n(t) = z(1) − 2k/(D − 2)·ln(2t − 1) are the log frequencies of NTK for stretch
    2t − 1.

    Chen et al. 2024, CLEX (arXiv:2310.16450), in the form of the released code, which has the sum
    z + n. W₂ starts at 0, which is NTK. The released models were trained with steps of 0.01; with
    0.1, frequencies of a random network differ by 3e-6. The code also multiplies queries by ln L /
    ln L0 at test time; `temperature` has similar factors.

    In training t is ⌈(largest position + 1) / L0⌉ of each row: `data.positions: random_multiple`
    draws it. Without that sampler only t = 1, plain RoPE, is trained; with `training.state: carry`
    t is that of the declared length, as in evaluation. All layers share one network.
    """

    cached_form = "rotated keys"
    settings: ClexSettings

    def setup(self):
        features = self.geometry.head_dim
        check_even(self)
        if features < 4:
            raise ModelError(f"clex requires heads of 4 features or more, got {features}")
        hidden = self.settings.width * features
        bound = hidden**-0.5
        self.up = self.learned((features // 2, hidden), uniform(-bound, bound))  # W₁
        self.down = self.learned((hidden, features // 2), constant(0.0))  # W₂
        self._start = Constant(plain_frequencies(self.settings.theta, features))

    @property
    def depends_on_length(self):
        return self.settings.max_factor > 1

    def tables(self, positions, dtype):
        """(1, t, R) float64 frequencies of t = 1, 2, ..., and t − 1 of each row, (B or 1, 1)."""
        factors = tuple(self.factor(length) - 1 for length in positions.lengths)
        rows = factors[:1] if len(set(factors)) == 1 else factors
        index = on_device(rows, positions.device, torch.int64)
        most = self.settings.max_factor if self._draws_factors else 1 + max(factors)
        return self.frequencies(positions.device, most)[None], index[:, None]

    @property
    def _draws_factors(self) -> bool:
        """Whether this is a training pass, whose positions determine t."""
        return self.training and torch.is_grad_enabled()

    def factor(self, length: int) -> int:
        """t of a sequence of `length` tokens."""
        factor = math.ceil(length / self.geometry.original_length)
        return min(max(1, factor), self.settings.max_factor)

    def frequencies(self, device: torch.device, most: int) -> Tensor:
        """(most, R) θ(1), θ(2), ... in radians per token, in float64, with gradient."""
        start = self._start.to(device)
        pairs = len(start)
        index = torch.arange(pairs, dtype=start.dtype, device=device) / (pairs - 1)
        with no_autocast(start):
            up = self.up.to(start.dtype)
            down = self.down.to(start.dtype)

            def slope(t: float, z: Tensor) -> Tensor:
                stretch = max(1.0, 2 * t - 1)
                ntk = start.log() - index * math.log(stretch)
                return torch.tanh((z + ntk) @ up) @ down - 2 * index / stretch

            logs = [start.log()]
            steps = math.ceil(1 / self.settings.step - 1e-9)
            for t in range(1, most):
                logs.append(integrated(slope, logs[-1], t, steps))
        return torch.stack(logs).exp()

    def plan(self, context):
        frequencies, index = context.tables
        if self._draws_factors and not context.is_carried:
            # t is random in training, and the sampler draws positions up to t times the length.
            end = (context.sequence or context.new).position.amax(1, keepdim=True) + 1
            factor = torch.ceil(end / self.geometry.original_length).long()
            index = factor.clamp(1, self.settings.max_factor) - 1
        chosen = frequencies[0][index]  # (B or 1, 1, R)
        position = from_the_middle(context, self.training).to(chosen.dtype)
        turns = turns_at(position[..., None] * chosen, mask_dtype(self.up))
        return rotation_plan(context, self.settings.layout, turns)


def integrated(slope: Callable[[float, Tensor], Tensor], z: Tensor, t: float, steps: int) -> Tensor:
    """z(t + 1) from z(t), by the classical Runge-Kutta method."""
    h = 1 / steps
    for n in range(steps):
        now = t + n * h
        first = slope(now, z)
        second = slope(now + h / 2, z + h / 2 * first)
        third = slope(now + h / 2, z + h / 2 * second)
        fourth = slope(now + h, z + h * third)
        z = z + h / 6 * (first + 2 * second + 2 * third + fourth)
    return z
