"""RoPE with learned frequencies."""

import math
from typing import Literal

import torch
from torch import Tensor

from model.attention.mask import mask_dtype
from model.position.interface import PositionalScheme, constant
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import (
    AngleSharingSettings,
    RotationSettings,
    check_even,
    rotation_plan,
)
from model.position.table import Constant


class LearnedRopeSettings(RotationSettings, AngleSharingSettings):
    """Rotary positions with learned frequencies, initialized as in RoPE."""

    name: Literal["learned_rope"] = "learned_rope"


class LearnedRope(PositionalScheme):
    """RoPE with θ_k = exp(ω_k), ω learned, initialized to ln b^(−2k/D); Su's blog on learning θ
    (kexue.fm). With `share: head` this is the simplest form of GRAPE (arXiv:2512.07805); its other
    forms are not included.

    The parameter is ω_k − ln b^(−2k/D), initialized to 0: the same function and gradient, but
    exactly RoPE at initialization in any dtype (ln θ in bfloat16 would have an error of 3%).

    Because the frequencies are learned, cos and sin are not cached: angles are computed in each
    pass, in float64, and reduced modulo 2π before they are rounded to float32. The gradient of θ_k
    grows with positions, which training passes measure from the middle of each row. Keys are cached
    rotated, so parameters must not change while a cache is in use.
    """

    cached_form = "rotated keys"
    settings: LearnedRopeSettings

    def setup(self):
        features = self.geometry.head_dim
        check_even(self.settings.name, self.geometry)
        self.log_ratio = self.learned(
            self.settings.shape(self.geometry, features // 2),
            constant(0.0),
        )
        self._start = Constant(plain_frequencies(self.settings.theta, features)[None])

    def tables(self, positions, dtype):
        """(1, R) initial θ in radians per token, in float64."""
        return (self._start.to(positions.device),)

    def frequencies(self) -> Tensor:
        """(R,) or (G, R) θ in radians per token, in float64, with gradient."""
        return self._learned(self._start.to(self.log_ratio.device)[0])

    def _learned(self, start: Tensor) -> Tensor:
        return self.log_ratio.to(start.dtype).exp() * start

    def _turns(self, position: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (B or 1, T, R) or (B or 1, G, T, R) at positions (B or 1, T)."""
        frequencies = self._learned(start)
        position = position.to(start.dtype)
        if frequencies.ndim == 2:
            frequencies = frequencies[:, None]
            position = position[:, None]
        angles = position[..., None] * frequencies
        dtype = mask_dtype(self.log_ratio)
        if dtype != torch.float64:
            angles = torch.remainder(angles, 2 * math.pi).to(dtype)
        return angles.cos(), angles.sin()

    def plan(self, context):
        position = context.new.position
        (start,) = context.tables[0]
        if self.training and torch.is_grad_enabled():
            # Scores depend on distance alone. The error of θ's gradient in bfloat16 is proportional
            # to the angles, so a training pass, which has no cache, measures positions from the
            # middle of each row.
            whole = (context.sequence or context.new).position
            position = position - (whole.amax(1, keepdim=True) + whole.amin(1, keepdim=True)) / 2
        return rotation_plan(context, self.settings.layout, self._turns(position, start))
