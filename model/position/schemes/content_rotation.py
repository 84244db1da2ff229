"""Content-dependent rotations: each token adds an increment to a cumulative angle."""

import math
from abc import abstractmethod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.mask import AttentionView, by_head, repeated
from model.position.content import (
    ContentSettings,
    causal_convolution,
    latest,
    linear,
    running_sum,
    series_of,
)
from model.position.interface import ContentScheme, constant, normal
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import check_even, rotate
from model.token_positions import TokenPositions
from settings.fields import setting


class ContentRotation(ContentScheme):
    """q_n → R(a_n) q_n, k_m → R(a_m) k_m with cumulative angles a_n = Σ_{t≤n} (increment of token
    t).

    Subclasses define the increments, for each key/value head and pair of features (k, k + D/2). The
    cached extras are the cumulative angles modulo 2π, and a history that a subclass defines.
    """

    cached_form = "rotated keys and cumulative angles"
    uses_position = False

    def setup(self):
        check_even(self)
        self.angles = self.geometry.head_dim // 2  # angles per head

    @abstractmethod
    def increments(
        self,
        features: Tensor,
        history: Tensor | None,
        new: TokenPositions,
        tables: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """Increments (B, T, G, D/2) in radians of tokens with these features, and their history (B,
        T, ·)."""

    def accumulate(self, features, past, new, tables):
        count = self.geometry.kv_heads * self.angles
        start = None
        history = None
        if (before := latest(past)) is not None:
            start = before[:, :count].double()
            history = before[:, count:]
        added, kept_history = self.increments(features, history, new, tables)
        # In float64: in float32 the fastest pairs are off by 5e-3 after 100,000 radians.
        running = running_sum(added.flatten(2).double(), start, new).remainder(2 * math.pi)
        return torch.cat([running.to(features.dtype), kept_history], dim=-1)

    def write(self, k, extras, tables):
        """Rotate k (B, G or H, T, D) by the cached angles (B, T, ·)."""
        groups = self.geometry.kv_heads
        angle = by_head(extras[..., : groups * self.angles], groups)
        angle = repeated(angle, k.shape[1])  # (B, G or H, T, D/2)
        return rotate(k, angle.cos(), angle.sin())

    def read(self, q, k, own, extras, plan):
        turned = self.write(q, own, ())
        return [AttentionView(turned, k, plan.mask)]


class SelectiveRopeSettings(ContentSettings):
    """Rotations by angles computed from the tokens (Selective RoPE, Movahedi et al. 2025)."""

    name: Literal["selective_rope"] = "selective_rope"
    theta: float = setting(500_000.0, "base b of the temperatures b^(−2k/D) of the pairs", gt=1)
    rank: int = setting(16, "rank of the projection to angles", ge=1)
    width: int = setting(4, "kernel size of the convolution, with the token itself", ge=2)


class SelectiveRope(ContentRotation):
    """a_n[k] = b^(−2k/D)·Σ_{t≤n} φ_t[k], φ = conv_4(W₂ W₁ x), rank 16, no activation; b = 500,000.

    Movahedi et al. 2025, Selective RoPE (arXiv:2511.17388), in the default form of the released
    code without gate or bias. The released code normalizes each head's part of x to length 1; here
    x is RMS-normalized and used as is, a difference that W₁ can learn. Angles are per key/value
    head. Tested against the formula in loops, not against the released code.
    """

    exempt: ClassVar[dict[str, str]] = {
        "window": "the angle between two tokens depends on the tokens between them and, by the "
        "convolution, "
        "on those just before"
    }
    projections = ("down",)
    settings: SelectiveRopeSettings

    def setup(self):
        """Increments of the fastest pair start at about 0.1 rad."""
        super().setup()
        dim = self.geometry.dim
        rank = self.settings.rank
        width = self.settings.width
        angles = self.geometry.kv_heads * self.angles
        self.down = self.learned((rank, dim), normal(dim**-0.5))  # W₁
        self.up = self.learned((angles, rank), normal(0.1 * rank**-0.5))  # W₂
        self.conv = self.learned((angles, width), normal(width**-0.5))
        # (D/2,) temperatures b^(−2k/D)
        self.constant_table(plain_frequencies(self.settings.theta, self.geometry.head_dim))

    def features(self, x, tables):
        # Before W₂: `rank` numbers per token instead of one per angle.
        return linear(x, self.down)

    def increments(self, features, history, new, tables):
        series, kept_history = series_of(features, history, self.settings.width)
        added = causal_convolution(linear(series, self.up), self.conv, new.order)
        return added.unflatten(-1, (-1, self.angles)) * tables[0], kept_history


class CaropeSettings(ContentSettings):
    """Rotations with a base computed from each token, per head (CARoPE, Veisi et al. 2025)."""

    name: Literal["carope"] = "carope"
    start: Literal["rope", "paper"] = setting(
        "rope",
        "rope: a learned bias, initialized to RoPE of base theta; paper: no bias, "
        "initialized to f = 0.59, far from RoPE's 0.75 (D = 64)",
    )
    theta: float = setting(10_000.0, "initial base with `start: rope`", gt=1)


class Carope(ContentRotation):
    """a_n[k] = Σ_{t≤n} f_t^k, f_t = 1/(softplus(w_g·x_t + b_g) + 1), k = 0, ..., D/2 − 1.

    Veisi et al. 2025, CARoPE (arXiv:2507.23083); f = b^(−2/D) for every token is RoPE of base b.
    The formula has no bias b_g and starts at f = 1/(ln 2 + 1) = 0.5906, while RoPE has 0.7499 for D
    = 64; `start: paper` omits the bias. One f per key/value head. Tested against the formula above,
    not against released code.
    """

    projections = ("weight",)
    settings: CaropeSettings

    def setup(self):
        """`start: rope` is RoPE exactly: w 0, and b with softplus(b) = base^(2/D) − 1."""
        super().setup()
        groups = self.geometry.kv_heads
        dim = self.geometry.dim
        self.bias = None
        if self.settings.start == "paper":
            self.weight = self.learned((groups, dim), normal(0.1 * dim**-0.5))
            return
        growth = self.settings.theta ** (2 / self.geometry.head_dim) - 1
        self.weight = self.learned((groups, dim), constant(0.0))
        self.bias = self.learned((groups,), constant(math.log(math.expm1(growth))))

    def features(self, x, tables):
        """ln f (B, T, G)."""
        return -torch.log1p(F.softplus(linear(x, self.weight, self.bias)))

    def increments(self, features, history, new, tables):
        powers = torch.arange(self.angles, device=features.device, dtype=features.dtype)
        return torch.exp(features[..., None] * powers), features[..., :0]
