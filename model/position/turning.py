"""Rotations by angles that the tokens themselves say: each adds its own to a running angle."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.errors import ModelError
from model.pairs import View, precise, repeated
from model.position.base import ContentPlan, Geometry, Position, Span
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
from model.position.places import Places
from model.position.rotary import rotate
from model.position.scaling import plain_frequencies


class Turning(Position):
    """q_n → R(a_n) q_n, k_m → R(a_m) k_m with running angles a_n = Σ_{t≤n} (what token t adds).

    Subclasses say what a token adds, for each key/value head and pair of features (k, k + D/2). The notes are
    the running angles, modulo 2π, and what a subclass wants to know of the tokens before.
    """

    remembers: ClassVar[str] = "rotated keys and running angles"
    uses_position: ClassVar[bool] = False

    def __init__(self, settings: ContentSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        if geometry.head_dim % 2:
            raise ModelError(
                f"{settings.name} turns features in pairs and needs an even head dimension, got "
                f"{geometry.head_dim}: change model.dim, model.heads or model.head_dim"
            )
        self.turned = geometry.head_dim // 2  # pairs of a head

    @abstractmethod
    def increments(self, x: Tensor, history: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        """Angles (B, T, G, D/2) in radians that the tokens x (B, T, C) add, and their history (B, T, ·)."""

    def plan(self, span: Span) -> ContentPlan:
        groups, turned = self.geometry.kv_heads, self.turned
        angles = groups * turned

        def note(x: Tensor, past: Tensor | None) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                x, before = precise(x), latest(past)
                history = None if before is None else before[:, angles:]
                added, remembered = self.increments(x, history, span)
                start = None if before is None else before[:, :angles].double()
                # In float64: in float32 the fastest pairs are off by 5e-3 after 100,000 radians.
                running = wrapped(running_sum(added.flatten(2).double(), start, span.new))
                return torch.cat([running.to(x.dtype), remembered], dim=-1)

        def turn(x: Tensor, notes: Tensor) -> Tensor:
            """x (B, G or H, T, D) by the angles noted (B, T, ·)."""
            angle = notes[..., :angles].unflatten(-1, (groups, turned)).transpose(1, 2)
            angle = repeated(angle, x.shape[1])  # (B, G or H, T, D/2)
            return rotate(x, angle.cos(), angle.sin(), "half")

        pairs = span.pairs()
        return ContentPlan(
            note,
            read=lambda q, k, notes: [View(turn(q, span.of_queries(notes)), k, pairs)],
            write=turn,
        )


class SelectiveRopeSettings(ContentSettings):
    """Rotations whose angles are read from the tokens (Selective RoPE, Movahedi et al. 2025)."""

    name: Literal["selective_rope"] = "selective_rope"
    theta: float = Field(500_000.0, gt=1, description="base b of the temperatures b^(−2k/D) of the pairs")
    rank: int = Field(16, ge=1, description="features that the angles are read from")
    width: int = Field(4, ge=2, description="tokens of the convolution, the token itself included")


class SelectiveRope(Turning):
    """a_n[k] = b^(−2k/D)·Σ_{t≤n} φ_t[k], φ = conv_4(W₂ W₁ x), rank 16, no activation; b = 500,000.

    Movahedi et al. 2025, Selective RoPE (arXiv:2511.17388), in the default form of the released code without
    gate or bias. There each head's share of x is first brought to length 1; here x comes RMS-normalised and
    enters as it is, which differs by what W₁ learns. Angles belong to a key/value head. Checked against the
    formula in loops, not against runs of the released code.
    """

    exempt: ClassVar[dict[str, str]] = {
        "window": "the angle between two tokens is read from the tokens between and, by the convolution, "
        "from those just before them"
    }
    settings: SelectiveRopeSettings

    def __init__(self, settings: SelectiveRopeSettings, geometry: Geometry):
        super().__init__(settings, geometry)
        angles = geometry.kv_heads * self.turned
        self.down = nn.Parameter(torch.empty(settings.rank, geometry.dim))
        self.up = nn.Parameter(torch.empty(angles, settings.rank))
        self.conv = nn.Parameter(torch.empty(angles, settings.width))
        self._temperatures: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # (1, D/2)

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """A token turns the fastest pair by about 0.1 rad: W₁ N(0, 1/C), W₂ N(0, 0.01/rank), the convolution
        N(0, 1/width)."""
        drawn(self.down, self.geometry.dim**-0.5, generator)
        drawn(self.up, 0.1 * self.settings.rank**-0.5, generator)
        drawn(self.conv, self.settings.width**-0.5, generator)

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        key = (places.position.device, dtype)
        if key not in self._temperatures:
            spectrum = plain_frequencies(self.settings.theta, self.geometry.head_dim)
            self._temperatures[key] = spectrum.to(*key)[None]
        return (self._temperatures[key],)

    def increments(self, x: Tensor, history: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        # The history is kept before W₂: `rank` numbers a token, not one for every angle.
        series, remembered = series_of(linear(x, self.down), history, self.settings.width)
        added = causal_convolution(linear(series, self.up), self.conv, span.new.order)
        return added.unflatten(-1, (self.geometry.kv_heads, self.turned)) * span.tables[0], remembered


class CaropeSettings(ContentSettings):
    """Rotations whose base is read from each token and head (CARoPE, Veisi et al. 2025)."""

    name: Literal["carope"] = "carope"
    start: Literal["rope", "paper"] = Field(
        "rope",
        description="rope: a learned bias starts every token at RoPE of base theta; paper: no bias, all "
        "start at f = 0.59, far from RoPE's 0.75 (D = 64)",
    )
    theta: float = Field(10_000.0, gt=1, description="base that `start: rope` starts from")


class Carope(Turning):
    """a_n[k] = Σ_{t≤n} f_t^k, f_t = 1/(softplus(w_g·x_t + b_g) + 1), k = 0, ..., D/2 − 1.

    Veisi et al. 2025, CARoPE (arXiv:2507.23083); f = b^(−2/D) for every token is RoPE of base b. The formula
    has no bias b_g and starts at f = 1/(ln 2 + 1) = 0.5906, where RoPE needs 0.7499 for D = 64; `start:
    paper` leaves it out. One f for each key/value head. Checked against the formula of the paper as given
    above, not against released code.
    """

    settings: CaropeSettings

    def __init__(self, settings: CaropeSettings, geometry: Geometry):
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

    def increments(self, x: Tensor, history: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        log_f = -torch.log1p(F.softplus(linear(x, self.weight, self.bias)))  # (B, T, G)
        powers = torch.arange(self.turned, device=x.device, dtype=x.dtype)
        return torch.exp(log_f[..., None] * powers), x[..., :0]
