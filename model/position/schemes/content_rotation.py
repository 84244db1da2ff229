"""Content-dependent rotations: each token adds an increment to a cumulative angle."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.attention.mask import AttentionView, precise, repeated
from model.position.base import AttentionContext, ContentPlan, HeadGeometry, PositionalScheme
from model.position.content import (
    ContentSettings,
    causal_convolution,
    drawn,
    latest,
    linear,
    running_sum,
    series_of,
    wrapped,
)
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import check_even, rotate
from model.position.token_positions import TokenPositions


class ContentRotation(PositionalScheme):
    """q_n → R(a_n) q_n, k_m → R(a_m) k_m with cumulative angles a_n = Σ_{t≤n} (increment of token t).

    Subclasses define the increments, for each key/value head and pair of features (k, k + D/2). The cached
    extras are the cumulative angles modulo 2π, and a history that a subclass defines.
    """

    cached_form: ClassVar[str] = "rotated keys and cumulative angles"
    uses_position: ClassVar[bool] = False

    def __init__(self, settings: ContentSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        check_even(settings.name, geometry)
        self.turned = geometry.head_dim // 2  # pairs per head

    @abstractmethod
    def increments(
        self, x: Tensor, history: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Increments (B, T, G, D/2) in radians of the tokens x (B, T, C), and their history (B, T, ·)."""

    def plan(self, context: AttentionContext) -> ContentPlan:
        groups, turned = self.geometry.kv_heads, self.turned
        angles = groups * turned

        def compute_extras(x: Tensor, past: Tensor | None) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                x, before = precise(x), latest(past)
                history = None if before is None else before[:, angles:]
                added, kept_history = self.increments(x, history, context)
                start = None if before is None else before[:, :angles].double()
                # In float64: in float32 the fastest pairs are off by 5e-3 after 100,000 radians.
                running = wrapped(running_sum(added.flatten(2).double(), start, context.new))
                return torch.cat([running.to(x.dtype), kept_history], dim=-1)

        def turn(x: Tensor, extras: Tensor) -> Tensor:
            """Rotate x (B, G or H, T, D) by the cached angles (B, T, ·)."""
            angle = extras[..., :angles].unflatten(-1, (groups, turned)).transpose(1, 2)
            angle = repeated(angle, x.shape[1])  # (B, G or H, T, D/2)
            return rotate(x, angle.cos(), angle.sin(), "half")

        pairs = context.pairs()
        return ContentPlan(
            compute_extras,
            read=lambda q, k, extras: [AttentionView(turn(q, context.of_queries(extras)), k, pairs)],
            write=turn,
        )


class SelectiveRopeSettings(ContentSettings):
    """Rotations by angles computed from the tokens (Selective RoPE, Movahedi et al. 2025)."""

    name: Literal["selective_rope"] = "selective_rope"
    theta: float = Field(500_000.0, gt=1, description="base b of the temperatures b^(−2k/D) of the pairs")
    rank: int = Field(16, ge=1, description="rank of the projection to angles")
    width: int = Field(4, ge=2, description="kernel size of the convolution, with the token itself")


class SelectiveRope(ContentRotation):
    """a_n[k] = b^(−2k/D)·Σ_{t≤n} φ_t[k], φ = conv_4(W₂ W₁ x), rank 16, no activation; b = 500,000.

    Movahedi et al. 2025, Selective RoPE (arXiv:2511.17388), in the default form of the released code without
    gate or bias. The released code normalises each head's part of x to length 1; here x is RMS-normalised and
    used as is, a difference that W₁ can learn. Angles are per key/value head. Tested against the formula in
    loops, not against the released code.
    """

    exempt: ClassVar[dict[str, str]] = {
        "window": "the angle between two tokens depends on the tokens between them and, by the convolution, "
        "on those just before"
    }
    settings: SelectiveRopeSettings

    def __init__(self, settings: SelectiveRopeSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        angles = geometry.kv_heads * self.turned
        self.down = nn.Parameter(torch.empty(settings.rank, geometry.dim))
        self.up = nn.Parameter(torch.empty(angles, settings.rank))
        self.conv = nn.Parameter(torch.empty(angles, settings.width))
        self._temperatures: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # (1, D/2)

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """W₁ N(0, 1/C), W₂ N(0, 0.01/rank), convolution N(0, 1/width): increments of the fastest pair are
        about 0.1 rad."""
        drawn(self.down, self.geometry.dim**-0.5, generator)
        drawn(self.up, 0.1 * self.settings.rank**-0.5, generator)
        drawn(self.conv, self.settings.width**-0.5, generator)

    def tables(self, positions: TokenPositions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        key = (positions.position.device, dtype)
        if key not in self._temperatures:
            spectrum = plain_frequencies(self.settings.theta, self.geometry.head_dim)
            self._temperatures[key] = spectrum.to(*key)[None]
        return (self._temperatures[key],)

    def increments(
        self, x: Tensor, history: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        # The history is stored before W₂: `rank` numbers per token instead of one per angle.
        series, kept_history = series_of(linear(x, self.down), history, self.settings.width)
        added = causal_convolution(linear(series, self.up), self.conv, context.new.order)
        return added.unflatten(-1, (self.geometry.kv_heads, self.turned)) * context.tables[0], kept_history


class CaropeSettings(ContentSettings):
    """Rotations with a base computed from each token, per head (CARoPE, Veisi et al. 2025)."""

    name: Literal["carope"] = "carope"
    start: Literal["rope", "paper"] = Field(
        "rope",
        description="rope: a learned bias, initialised to RoPE of base theta; paper: no bias, initialised to "
        "f = 0.59, far from RoPE's 0.75 (D = 64)",
    )
    theta: float = Field(10_000.0, gt=1, description="initial base with `start: rope`")


class Carope(ContentRotation):
    """a_n[k] = Σ_{t≤n} f_t^k, f_t = 1/(softplus(w_g·x_t + b_g) + 1), k = 0, ..., D/2 − 1.

    Veisi et al. 2025, CARoPE (arXiv:2507.23083); f = b^(−2/D) for every token is RoPE of base b. The formula
    has no bias b_g and starts at f = 1/(ln 2 + 1) = 0.5906, where RoPE has 0.7499 for D = 64; `start:
    paper` omits the bias. One f per key/value head. Tested against the formula above, not against released
    code.
    """

    settings: CaropeSettings

    def __init__(self, settings: CaropeSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        groups = geometry.kv_heads
        self.weight = nn.Parameter(torch.empty(groups, geometry.dim))
        self.bias = nn.Parameter(torch.empty(groups)) if settings.start == "rope" else None

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """`start: rope` is RoPE exactly: w 0, and b with softplus(b) = base^(2/D) − 1. `start: paper`: w is
        N(0, 1/(100·C))."""
        if self.bias is None:
            drawn(self.weight, 0.1 * self.geometry.dim**-0.5, generator)
            return
        with torch.no_grad():
            self.weight.zero_()
            growth = torch.tensor(self.settings.theta, dtype=torch.float64) ** (2 / self.geometry.head_dim)
            self.bias.fill_(float((growth - 1).expm1().log()))

    def increments(
        self, x: Tensor, history: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        log_f = -torch.log1p(F.softplus(linear(x, self.weight, self.bias)))  # (B, T, G)
        powers = torch.arange(self.turned, device=x.device, dtype=x.dtype)
        return torch.exp(log_f[..., None] * powers), x[..., :0]
