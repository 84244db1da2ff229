"""RoPE with learned frequencies."""

import math
from typing import Literal

import torch
from torch import Tensor

from model.attention.mask import mask_dtype
from model.position.interface import AttentionContext, PositionalScheme, constant
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import (
    AngleSharingSettings,
    RotationSettings,
    check_even,
    rotation_plan,
)
from model.position.table import Constant


def from_the_middle(context: AttentionContext, is_training: bool) -> Tensor:
    """The positions of the new tokens (B or 1, T); in a training pass that carries no keys, counted
    from the middle of each row.

    Scores depend on distance alone. The error of a frequency's gradient in bfloat16 is proportional
    to the angles.
    """
    position = context.new.position
    if context.is_carried or not (is_training and torch.is_grad_enabled()):
        return position
    whole = (context.sequence or context.new).position
    return position - (whole.amax(1, keepdim=True) + whole.amin(1, keepdim=True)) / 2


def turns_at(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of angles in float64, reduced modulo 2π before they are rounded."""
    if dtype != torch.float64:
        angles = torch.remainder(angles, 2 * math.pi).to(dtype)
    return angles.cos(), angles.sin()


class LearnedRopeSettings(RotationSettings, AngleSharingSettings):
    """Rotary positions with learned frequencies, initialized as in RoPE."""

    name: Literal["learned_rope"] = "learned_rope"


class LearnedRope(PositionalScheme):
    """RoPE with θ_k = exp(ω_k), ω learned, initialized to ln b^(−2k/D); Su's blog on learning θ
    (kexue.fm). With `share: head` this is the simplest form of GRAPE (arXiv:2512.07805), whose
    biases are `grape_a` and `grape_ap`.

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
        check_even(self)
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
        return turns_at(position[..., None] * frequencies, mask_dtype(self.log_ratio))

    def plan(self, context):
        (start,) = context.tables[0]
        position = from_the_middle(context, self.training)
        return rotation_plan(context, self.settings.layout, self._turns(position, start))
