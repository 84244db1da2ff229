"""Rotations other than RoPE with fixed frequencies: learned frequencies, CLEX, xPos, FoPE, PoPE and
hyperbolic rotations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import ModelError
from model.attention.mask import AttentionView, QueryBlock, mask_dtype, no_autocast
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    PositionSettings,
    TabulatedScheme,
    constant,
    uniform,
)
from model.position.pairwise import UNROLLED, decayed_scores
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import (
    AngleSharingSettings,
    Layout,
    RotationSettings,
    Share,
    check_even,
    rotation_plan,
)
from model.position.table import Constant, on_device
from settings.fields import setting


def from_the_middle(context: AttentionContext, is_training: bool) -> Tensor:
    """The positions of the new tokens (B or 1, T); in a training pass, which has no cache, those
    from the middle of each row.

    Scores depend on distance alone. The error of a frequency's gradient in bfloat16 is proportional
    to the angles.
    """
    position = context.new.position
    if not (is_training and torch.is_grad_enabled()):
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


class ClexSettings(RotationSettings):
    """Rotary positions whose frequencies a learned differential equation scales (CLEX, Chen et al.
    2024)."""

    name: Literal["clex"] = "clex"
    max_factor: int = setting(16, "largest t; longer sequences use its frequencies", ge=1)
    width: int = setting(1, "hidden features of the network, as a multiple of D", ge=1)
    step: float = setting(0.1, "step of the integration in t", gt=0, le=1)


class Clex(PositionalScheme):
    """RoPE with frequencies e^z(t), t = ⌈L/L0⌉, z(1) = ln b^(−2k/D) and dz/dt = dn/dt + W₂ tanh(W₁
    (z + n)), where n(t) = z(1) − 2k/(D − 2)·ln(2t − 1) are those of NTK for 2t − 1.

    Chen et al. 2024, CLEX (arXiv:2310.16450), in the form of the released code, which has the sum
    z + n. W₂ starts at 0, which is NTK. The released models were trained with steps of 0.01; with
    0.1, frequencies of a random network differ by 3e-6. The code also multiplies queries by ln L /
    ln L0 at test time; `temperature` has similar factors.

    In training t is ⌈(largest position + 1) / L0⌉ of each row: `data.positions: random_multiple`
    draws it. Without that sampler only t = 1, plain RoPE, is trained. All layers share one network.
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
        if self._draws_factors:
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


# Natural logarithm of the largest factor on a key. The range of float32 and bfloat16 is e^±87; the
# margin is for the keys themselves and for gradients, which are multiplied by the query's factor of
# e^−64.
LARGEST = 64.0


class XPosSettings(RotationSettings):
    """Rotary positions with an exponential decay per pair (Sun et al. 2022)."""

    test_time = RotationSettings.test_time | {"theta"}

    name: Literal["xpos"] = "xpos"
    layout: Layout = setting("interleaved", "features of a pair: (2k, 2k + 1) or (k, k + D/2)")
    gamma: float = setting(0.4, "γ of ζ_k = (2k + γD) / ((1 + γ)D): more decays less", gt=0)
    scale_base: float = setting(512.0, "S: distance after which pair k has decayed to ζ_k", gt=0)


class XPos(TabulatedScheme):
    """xPos: q_n → ζ^(n/S) R(nθ) q_n, k_m → ζ^(−m/S) R(mθ) k_m, so the contribution of pair k to the
    score is RoPE's times ζ_k^(d/S), ζ_k = (2k + γD)/((1 + γ)D). Sun et al. 2022 (arXiv:2212.10554),
    algorithm 1, γ = 0.4.

    Position 0 is the origin. The released code uses half the current length as origin: scores are
    the same, but cached keys would change as the text grows. The disadvantage is range: factors of
    keys grow as ζ_0^(−m/S), and float32 and bfloat16 overflow at e^87. Positions are limited to
    factors up to e^64 (26,156 with the default S and γ); the limit is proportional to S, which must
    be set before training.
    """

    cached_form = "rotated and scaled keys"
    settings: XPosSettings

    def setup(self):
        check_even(self)
        dims = self.geometry.head_dim
        gamma = self.settings.gamma
        self._frequencies = Constant(plain_frequencies(self.settings.theta, dims))
        # float64 ln ζ_k / S: log growth of the query factor per token
        shares = torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims
        self._growth = Constant(((shares + gamma) / (1 + gamma)).log() / self.settings.scale_base)

    @property
    def limit(self):
        zeta = self.settings.gamma / (1 + self.settings.gamma)
        return 1 + math.floor(LARGEST * self.settings.scale_base / -math.log(zeta))

    def rows(self, positions):
        """cos and sin (..., R) for queries, and for keys."""
        angles = positions[..., None] * self._frequencies.to(positions.device)
        scale = (positions[..., None] * self._growth.to(positions.device)).exp()
        cos = angles.cos()
        sin = angles.sin()
        return cos * scale, sin * scale, cos / scale, sin / scale

    def plan(self, context):
        q_cos, q_sin, k_cos, k_sin = context.tables
        return rotation_plan(context, self.settings.layout, (k_cos, k_sin), (q_cos, q_sin))


class FopeSettings(RotationSettings):
    """Rotary positions whose cosines and sines are learned mixtures of frequencies (FoPE)."""

    per_layer = True

    name: Literal["fope"] = "fope"
    max_length: int | None = setting(
        None,
        "drop frequencies below 2π / max_length; fixed after training; null: original_length",
        ge=1,
    )
    gain: float = setting(
        0.3,
        "Xavier gain of the noise added to the identity to initialize the mixtures",
        ge=0,
    )
    clipped: Literal["identity", "ones"] = setting(
        "identity",
        "pairs of dropped frequencies: unchanged, or cos = sin = 1: rotated by 45° "
        "and scaled by √2 at every position",
    )


class Fope(TabulatedScheme):
    """FoPE: pair k is rotated by (Σ_j A_jk cos nθ_j, Σ_j B_jk sin nθ_j) instead of (cos nθ_k, sin
    nθ_k), over the J frequencies θ_j ≥ 2π/L0; lower frequencies are dropped. Hua et al. 2024
    (arXiv:2412.17739).

    Based on a description of a fork of the released code; not compared with the paper's text. A and
    B are learned per key/value head and layer, initialized to the identity plus N(0, gain²/J), the
    Xavier variance of one J × J matrix (the fork includes the heads in the fan). For dropped
    frequencies, the fork sets both cos and sin to 1, a scaled rotation by 45° at all positions
    (`clipped: ones`); the paper uses a zero frequency, i.e. cos 1 and sin 0 (`clipped: identity`,
    the default). Scores are not a function of distance alone, because cos² + sin² is not 1.
    """

    cached_form = "rotated keys"
    exempt: ClassVar[dict[str, str]] = {
        "shift": "scores depend on n and m: mixtures of cosines and sines do not obey the addition "
        "theorem"
    }
    settings: FopeSettings

    def setup(self):
        settings = self.settings
        geometry = self.geometry
        check_even(self)
        plain = plain_frequencies(settings.theta, geometry.head_dim)
        length = settings.max_length or geometry.original_length
        frequencies = plain[plain >= 2 * math.pi / length]  # in decreasing order
        self._dropped = len(plain) - len(frequencies)
        kept = len(frequencies)
        self._kept = Constant(frequencies)
        if not kept:
            raise ModelError(
                f"fope has no frequency of at least 2π/{length}: raise model.position.max_length, "
                "or use 7 training tokens or more"
            )
        shape = (geometry.kv_heads, kept, kept)  # (G, J, J)
        self.cos_mix = self.learned(shape, self._near_identity)  # A
        self.sin_mix = self.learned(shape, self._near_identity)  # B

    def _near_identity(
        self,
        shape: torch.Size,
        generator: torch.Generator,
    ) -> Tensor:
        noise = torch.randn(shape, generator=generator) * self.settings.gain * shape[1] ** -0.5
        return torch.eye(shape[1]) + noise

    def rows(self, positions):
        """cos and sin (..., J) of the kept frequencies."""
        angles = positions[..., None] * self._kept.to(positions.device)
        return angles.cos(), angles.sin()

    def _mixed(self, rows: Tensor, mix: Tensor, dropped: float) -> Tensor:
        """(B or 1, T, J) → (B or 1, G, T, R): the mixtures, and a constant for the dropped
        pairs."""
        dtype = mask_dtype(mix)
        with no_autocast(rows):
            mixed = rows[:, None].to(dtype) @ mix.to(dtype)  # (B or 1, 1, T, J) @ (G, J, J)
        return nn.functional.pad(mixed, (0, self._dropped), value=dropped)

    def plan(self, context):
        rest = 1.0 if self.settings.clipped == "ones" else 0.0
        cos = self._mixed(context.tables[0], self.cos_mix, 1.0)
        sin = self._mixed(context.tables[1], self.sin_mix, rest)
        return rotation_plan(context, self.settings.layout, (cos, sin))


class PopeSettings(AngleSharingSettings):
    """Polar positions: magnitudes are content, phases are position (Gopalakrishnan et al. 2025)."""

    test_time = AngleSharingSettings.test_time | {"theta"}

    name: Literal["pope"] = "pope"
    theta: float = setting(10_000.0, "base b of the D frequencies b^(−c/D)", gt=1)
    share: Share = setting(
        "layer",
        "one set of key phases per model, per layer, or per key/value head of each layer",
    )
    phase: Literal["zero", "uniform"] = setting(
        "zero",
        "initial key phases: 0, or drawn from −2π to 0",
    )


class Pope(TabulatedScheme):
    """PoPE: score = Σ_c μ(q_c) μ(k_c) cos(dθ_c − δ_c), μ = softplus, θ_c = b^(−c/D), one for each
    of the D features. Gopalakrishnan et al. 2025 (arXiv:2509.10534).

    A feature is mapped to the point of magnitude μ and phase nθ_c (queries) or mθ_c + δ_c (keys),
    so that q and k are 2D wide, [μ cos | μ sin], while values stay D wide; the scale stays 1/√D.
    Each layer has its own phases δ by default, following the formula's single index c;
    x-transformers has them per head, shared by all layers, and clamps δ to [−2π, 0], where a phase
    that leaves the range at 0, its initial value, gets no gradient. Only cos δ and sin δ are used,
    so here δ is unrestricted and equivalent to the one in that range.
    """

    cached_form = "polar keys, twice as wide"
    settings: PopeSettings

    def setup(self):
        lowest = -2 * math.pi if self.settings.phase == "uniform" else 0.0
        shape = self.settings.shape(self.geometry, self.geometry.head_dim)  # (D,) or (G, D)
        self.phase = self.learned(shape, uniform(0.0, lowest))  # δ
        count = self.geometry.head_dim
        features = torch.arange(count, dtype=torch.float64, device="cpu")
        self._frequencies = Constant(self.settings.theta ** -(features / count))

    @property
    def key_features(self):
        return 2 * self.geometry.head_dim

    def rows(self, positions):
        """cos and sin (..., D) of nθ."""
        angles = positions[..., None] * self._frequencies.to(positions.device)
        return angles.cos(), angles.sin()

    def plan(self, context):
        cos, sin = (x[:, None] for x in context.tables)  # (B or 1, 1, T, D)
        q_cos = context.of_queries(cos, dim=2)
        q_sin = context.of_queries(sin, dim=2)
        phase = self.phase.to(mask_dtype(self.phase))
        phase = phase[:, None] if phase.ndim == 2 else phase  # (D,) or (G, 1, D)
        k_cos = cos * phase.cos() - sin * phase.sin()  # of mθ + δ
        k_sin = sin * phase.cos() + cos * phase.sin()
        mask = context.mask()

        def polar(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            size = F.softplus(x.to(cos.dtype))
            return torch.cat([size * cos, size * sin], dim=-1).to(x.dtype)

        return AttentionPlan(
            read=lambda q, k: [AttentionView(polar(q, q_cos, q_sin), k, mask)],
            write=lambda k: polar(k, k_cos, k_sin),
            linear=False,
        )


class HyperbolicSettings(PositionSettings):
    """Hyperbolic rotations, with scores that decay with distance (HoPE, Dai et al. 2025)."""

    name: Literal["hyperbolic"] = "hyperbolic"
    theta: float = setting(10_000.0, "base b of the frequencies fastest·b^(−2k/D)", gt=1)
    fastest: float = setting(1.0, "largest frequency θ_0, per token", gt=0)
    margin: float = setting(
        0.1,
        "decay rate θ' = θ_0·(1 + margin); the slowest feature decays at θ_0·margin",
        gt=0,
    )
    damping: Literal["fixed", "learned"] = setting(
        "fixed",
        "learned: one margin per layer, initialized to margin",
    )

    @property
    def per_layer(self):
        return self.damping == "learned"


class Hyperbolic(PositionalScheme):
    """HoPE: score = Σ_k e^(−dθ') q_kᵀ [[cosh dθ_k, sinh dθ_k], [sinh dθ_k, cosh dθ_k]] k_k over
    pairs of features (k, k + D/2), θ' > θ_k. Dai et al. 2025 (arXiv:2509.05218). Not Chen et al.'s
    HoPE, see p_rope.

    With u = (x1 + x2)/√2 and w = (x1 − x2)/√2 of a pair the matrix is diagonal: score = Σ_k e^(−(θ'
    − θ_k)d) u_q u_k + e^(−(θ' + θ_k)d) w_q w_k, one decay rate per feature. The implementation uses
    this form. The published form, applied to q and k separately, suffers from cancellation: float64
    loses all precision after 40 tokens, and float32 overflows after 88.

    No factor exceeds 1 if positions increase along a document (also skipped, random or fractional
    ones). For keys before its block of 16, a query uses e^(−γ(n − n0)) e^(−γ(n0 − m)), where n0 ≥ m
    is the first position of the block's queries that attend to such keys: a factor underflows only
    if the score does. Keys inside the block are computed pair by pair. If positions decrease along
    a document, distances are negative and scores grow, as in the formula. Keys are cached in the
    coordinates u, w, without positions.
    """

    cached_form = "plain keys, in the coordinates u and w"
    reads_features = True
    exempt = UNROLLED
    settings: HyperbolicSettings

    def setup(self):
        settings = self.settings
        geometry = self.geometry
        check_even(self)
        self.log_margin = None
        if settings.damping == "learned":
            self.log_margin = self.learned((1,), constant(math.log(settings.margin)))
        speeds = settings.fastest * plain_frequencies(settings.theta, geometry.head_dim)
        # (D,) the rates minus θ_0·margin, in float64
        rests = torch.cat([speeds[0] - speeds, speeds[0] + speeds])
        self.constant_table(rests, keep_dtype=True)

    def rates(self, rests: Tensor) -> Tensor:
        """(D,) γ: θ' − θ_k of the features u, then θ' + θ_k of the features w, per token."""
        if self.log_margin is None:
            return rests + self.settings.fastest * self.settings.margin
        return rests + self.settings.fastest * self.log_margin.to(rests.dtype).exp()

    def plan(self, context):
        rates = self.rates(*context.tables)
        q_position = context.queries.position.double()[:, None, :, None]
        k_position = context.keys.position.double()[:, None, :, None]
        mask = context.mask()

        def weights_fn(block: QueryBlock) -> Tensor:
            n = q_position[:, :, block.start : block.stop]
            m = k_position[:, :, block.keys]
            scores = decayed_scores(block, -n * rates, -m * rates)
            return block.weights_of(scores * block.scale)

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            return [AttentionView(diagonal(q), k, mask, weights_fn)]

        return AttentionPlan(read, write=diagonal)


def diagonal(x: Tensor) -> Tensor:
    """(..., D) features → [u | w], the coordinates in which hyperbolic rotations are diagonal."""
    a, b = x.to(mask_dtype(x)).chunk(2, dim=-1)
    return (torch.cat([a + b, a - b], dim=-1) * math.sqrt(0.5)).to(x.dtype)
