"""Schemes that read the layer input: FoX, GRAPE, Wall, relative logits, PaTH, Selective RoPE and
CARoPE."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import ModelError
from model.attention.mask import (
    AttentionMask,
    AttentionView,
    BiasForms,
    QueryBlock,
    by_head,
    mask_dtype,
    no_autocast,
    precise,
    repeated,
)
from model.position.content import (
    ContentSettings,
    causal_convolution,
    latest,
    linear,
    running_sum,
    series_of,
    unit,
)
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    ContentScheme,
    PositionalScheme,
    PositionSettings,
    constant,
    normal,
)
from model.position.pairwise import UNROLLED, decayed_scores, sum_after
from model.position.scaling import plain_frequencies
from model.position.schemes.biases import alibi_slopes
from model.position.schemes.rope import Rope, RopeSettings, check_even, rotate
from model.position.table import LookupTable
from model.token_positions import TokenPositions
from settings.fields import setting


class FoxSettings(ContentSettings):
    """Forget gates computed from each token (FoX, Lin et al. 2025)."""

    test_time = ContentSettings.test_time | {"theta"}

    name: Literal["fox"] = "fox"
    gate: Literal["linear", "constant", "fixed"] = setting(
        "linear",
        "computed from each token; a learned constant per head, initialized as in "
        "ALiBi; or the fixed ALiBi slopes",
    )
    rotary: bool = setting(False, "also apply RoPE")
    theta: float = setting(10_000.0, "base of the RoPE frequencies with rotary", gt=1)


class Fox(ContentScheme):
    """logit += c_n − c_m, c_n = Σ_{t≤n} ln σ(w_h·x_t + β_h), after the 1/√D scale; 0 for n = m.

    Lin et al. 2025, forgetting transformer (arXiv:2503.02130); Cable (arXiv:2503.08067), whose gate
    is −softplus(w_h·x + β_h), is the same with w and β negated. A constant gate is ALiBi with slope
    −ln σ(β). One gate per query head; positions are used with `rotary` only. Tested against the
    formula in loops; compared once with FLA's `naive_forgetting_attn`: outputs agree to 1e-6 in
    float32, also with a window.
    """

    cached_form = "plain (or rotated) keys and cumulative log gates"
    settings: FoxSettings

    def setup(self):
        """Linear gates start near σ(0) = ½; constant gates as in ALiBi, σ(β) = e^−slope."""
        heads = self.geometry.heads
        dim = self.geometry.dim
        slopes = alibi_slopes(heads)
        start = -slopes.expm1().log()
        self.weight = None
        self.bias = None
        if self.settings.gate == "linear":
            start = torch.zeros(heads)
            self.weight = self.learned((heads, dim), normal(0.1 * dim**-0.5))
        if self.settings.gate != "fixed":
            self.bias = self.learned((heads,), constant(start))
        rope = RopeSettings.model_validate({"theta": self.settings.theta})
        self._rope = Rope(rope, self.geometry) if self.settings.rotary else None
        self.constant_table(slopes)

    def tables(self, positions, dtype):
        """(H,) slopes of the fixed gate, and the rotation's cos and sin."""
        turns = () if self._rope is None else self._rope.tables(positions, dtype)
        return super().tables(positions, dtype) + turns

    def features(self, x, tables):
        """(B, T, H) log forget gates."""
        if self.weight is not None:
            return F.logsigmoid(linear(x, self.weight, self.bias))
        gate = -tables[0]
        if self.bias is not None:
            gate = F.logsigmoid(self.bias.to(x.dtype))
        return gate.expand(*x.shape[:2], -1)

    def accumulate(self, features, past, new, tables):
        # Cache the sum, not the gates, sufficient after eviction. In float64, because float32
        # cannot resolve single gates after 50,000 tokens.
        return running_sum(features.double(), latest(past), new)

    def write(self, k, extras, tables):
        return rotate(k, tables[1], tables[2]) if self.settings.rotary else k

    def read(self, q, k, extras, plan):
        context = plan.context
        if self.settings.rotary:
            _, cos, sin = context.tables
            q = rotate(q, context.of_queries(cos), context.of_queries(sin))
        return [AttentionView(q, k, self._mask(context, extras, mask_dtype(q)))]

    def _mask(
        self,
        context: AttentionContext,
        extras: Tensor,
        dtype: torch.dtype,
    ) -> AttentionMask:
        # Integer and fractional parts, so that float32 differences are exact to 1e-7.
        sums = extras.transpose(1, 2)  # (B, H, S)
        whole = sums.detach().floor()
        k_whole = whole.to(dtype)
        k_rest = (sums - whole).to(dtype)
        q_whole = context.of_queries(k_whole, 2)
        q_rest = context.of_queries(k_rest, 2)
        if self.settings.sink_logit == "none":
            # A term of the query alone shifts all of its logits, which softmax ignores: its
            # gradient is 0.
            q_rest = q_rest.detach()

        def bias(b, h, i, j):
            whole = q_whole[b, h, i] - k_whole[b, h, j]
            return whole + (q_rest[b, h, i] - k_rest[b, h, j])

        return context.mask(bias=bias, forms=BiasForms(key_sums=sums), by_row=True)


class GrapeASettings(PositionSettings):
    """ALiBi with a rate computed from each query (query-gated GRAPE-A, Zhang et al. 2025)."""

    per_layer = True

    name: Literal["grape_a"] = "grape_a"


class GrapeA(PositionalScheme):
    """logit −= d·slope_h·softplus(w_h)·softplus(v_h·q/√D), |v_h| = 1, with ALiBi's slopes.

    Zhang et al. 2025, GRAPE (arXiv:2512.07805), in the query-gated form of the released code. The
    paper has ω_h·softplus(v_h·q); slopes, the unit length of v and 1/√D are in the code only. q is
    the query as attention uses it, after `model.qk_norm`, which the released models have. At the
    start softplus(w) = 1, so that the mean rate is near ln 2 times that of ALiBi.
    """

    reads_features = True
    settings: GrapeASettings

    def setup(self):
        heads = self.geometry.heads
        features = self.geometry.head_dim
        self.rate = self.learned((heads,), constant(math.log(math.expm1(1.0))))  # w
        self.direction = self.learned((heads, features), normal(features**-0.5))  # v
        self.constant_table(alibi_slopes(heads))

    def plan(self, context):
        separation = context.separation()
        (slopes,) = context.tables

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            v = F.normalize(precise(self.direction), dim=-1)[:, None]
            gate = F.softplus((precise(q) * v).sum(-1) / self.geometry.head_dim**0.5)
            rates = gate * (F.softplus(precise(self.rate)) * slopes)[:, None]  # (B, H, K)
            mask = context.mask(
                bias=lambda b, h, i, j: -separation(b, i, j) * rates[b, h, i],
                by_row=True,
            )
            return [AttentionView(q, k, mask)]

        return AttentionPlan(read, linear=False, is_unordered=True)


class GrapeApSettings(ContentSettings):
    """A penalty summed up along the path from key to query (GRAPE-AP, Zhang et al. 2025)."""

    reads_between = True

    name: Literal["grape_ap"] = "grape_ap"
    gate_features: int = setting(8, "F, features of p for each head, an even number", ge=2)


class GrapeAp(ContentScheme):
    """logit += slope_h·Σ_{l=m+1..n} ln σ(p_n·R(l)ᵀ p̂_l / F), p = W x with F = 8 features for each
    head, p̂ = p / RMS(p), with ALiBi's slopes; 0 for n = m.

    Zhang et al. 2025, GRAPE (arXiv:2512.07805), in the form of the released code, which was
    trained: p of the query is neither normalized nor rotated, and R(l) turns all pairs (k, k + F/2)
    by l radians. The bias therefore depends on the absolute positions of the tokens between.
    """

    cached_form = "plain keys, p and rotated p̂"
    exempt: ClassVar[dict[str, str]] = UNROLLED | {
        "shift": "p̂ is rotated by absolute positions, and p of the query is not"
    }
    settings: GrapeApSettings

    def setup(self):
        features = self.settings.gate_features
        if features % 2:
            raise ModelError(f"model.position.gate_features = {features} must be even")
        dim = self.geometry.dim
        heads = self.geometry.heads
        self.project = self.learned((heads * features, dim), normal(0.5 * dim**-0.5))  # W
        self.constant_table(alibi_slopes(heads))
        self._table = LookupTable(lambda n: (n.cos()[..., None], n.sin()[..., None]))

    def tables(self, positions, dtype):
        """(H,) slopes, and cos and sin of the positions, (B or 1, T, 1)."""
        turns = self._table.look_up(positions.position, positions.position_end, dtype)
        return super().tables(positions, dtype) + turns

    def features(self, x, tables):
        """(B, T, 2·H·F): p and rotated p̂."""
        features = self.settings.gate_features
        cos, sin = (table.expand(-1, -1, features // 2) for table in tables[1:])
        p = by_head(linear(x, self.project), self.geometry.heads)
        rotated = rotate(F.rms_norm(p, (features,)), cos, -sin)
        return torch.cat([p, rotated], dim=1).transpose(1, 2).flatten(2)

    def read(self, q, k, extras, plan):
        context = plan.context
        slopes = context.tables[0][:, None, None]
        p, rotated = by_head(extras, 2 * self.geometry.heads).chunk(2, dim=1)  # (B, H, S, F)
        p = context.of_queries(p, dim=2)

        def weights_fn(block: QueryBlock) -> Tensor:
            products = p[:, :, block.start : block.stop] @ rotated[:, :, block.keys].mT
            gates = F.logsigmoid(products / self.settings.gate_features)
            gates = torch.where(block.visible, gates, 0.0)
            return block.weights_of(block.scores + slopes * sum_after(gates))

        return [AttentionView(q, k, plan.mask, weights_fn)]


class WallSettings(ContentSettings):
    """Cumulative gates for every feature of every head, computed from each token (Wall attention,
    2026)."""

    name: Literal["wall"] = "wall"
    gate_bias: float = setting(
        8.0,
        "initial bias of the gates; at 8 a feature keeps 0.9997 per token",
    )


class Wall(ContentScheme):
    """logit = Σ_c q_nc k_mc e^(P_nc − P_mc)/√D, P_n = Σ_{t≤n} ln σ(W x_t + β) for each query head
    and feature. FoX has one gate per head, which it adds to the logit.

    Averbuch and Pai 2026, as in flash-linear-attention 0.6.0 (`parallel_wall_attn`); without a
    paper. β starts at `gate_bias`.
    """

    cached_form = "plain keys and cumulative log gates of every feature"
    uses_position = False
    reads_features = True
    exempt = UNROLLED
    settings: WallSettings

    def setup(self):
        dim = self.geometry.dim
        gates = self.geometry.heads * self.geometry.head_dim
        self.weight = self.learned((gates, dim), normal(dim**-0.5))
        self.bias = self.learned((gates,), constant(self.settings.gate_bias))

    def features(self, x, tables):
        """(B, T, H·D) log gates."""
        return F.logsigmoid(linear(x, self.weight, self.bias))

    def accumulate(self, features, past, new, tables):
        # In float64, because float32 cannot resolve single gates after 50,000 tokens.
        return running_sum(features.double(), latest(past), new)

    def read(self, q, k, extras, plan):
        k_decay = by_head(extras, self.geometry.heads)
        q_decay = plan.context.of_queries(k_decay, dim=2)

        def weights(block: QueryBlock) -> Tensor:
            own = q_decay[:, :, block.start : block.stop]
            scores = decayed_scores(block, own, k_decay[:, :, block.keys])
            return block.weights_of(scores * block.scale)

        return [AttentionView(q, k, plan.mask, weights)]


class RelativeLogitsSettings(ContentSettings):
    """Learned logits by distance, which the query's token mixes (Inkling, 2026)."""

    name: Literal["relative_logits"] = "relative_logits"
    profiles: int = setting(16, "R: number of profiles in each layer", ge=1)
    extent: int = setting(
        128,
        "E: distances from here on add 0 to the logit; 1,024 in Inkling",
        ge=1,
    )


class RelativeLogits(ContentScheme):
    """logit += Σ_r (W_h x_n)_r P[r, d] for distances d < E, after the 1/√D scale; 0 beyond.

    Inkling's relative logits, as in its released implementation in transformers
    (`InklingRelativeLogits`); without a paper. Each layer has W (H·R, C) and P (R, E), which its
    heads share. P is initialized to 0, which is NoPE. A temperature scales q·k only; Inkling's
    scales these logits too. E cannot be changed after training.
    """

    supports_fractions = False
    caches_extras = False
    settings: RelativeLogitsSettings

    def setup(self):
        dim = self.geometry.dim
        profiles = self.settings.profiles
        shape = (self.geometry.heads * profiles, dim)
        self.mix = self.learned(shape, normal(dim**-0.5))
        self.profiles = self.learned((profiles, self.settings.extent), constant(0.0))

    def features(self, x, tables):
        """(B, T, H·R) weights of the profiles."""
        return linear(x, self.mix)

    def read(self, q, k, extras, plan):
        context = plan.context
        weights = context.of_queries(extras).unflatten(2, (self.geometry.heads, -1))
        with no_autocast(q):
            rows = weights @ self.profiles.to(weights.dtype)  # (B, Q, H, E)
        separation = context.separation()
        extent = self.settings.extent

        def bias(b, h, i, j):
            d = separation(b, i, j)
            return torch.where(d < extent, rows[b, i, h, d.clamp(0, extent - 1)], 0.0)

        return [AttentionView(q, k, context.mask(bias=bias, by_row=True))]


CHUNK = 128  # keys per chunk; the cost of a pair is D + CHUNK


class PathSettings(ContentSettings):
    """Products of Householder-like matrices between query and key (PaTH, Yang et al. 2025)."""

    reads_between = True

    name: Literal["path"] = "path"
    rank: int = setting(32, "rank of the projection to directions w", ge=1)
    width: int = setting(3, "kernel size of the convolution, with the token itself", ge=2)


class PathAttention(ContentScheme):
    """logit = q_nᵀ H_n H_{n−1} ⋯ H_{m+1} k_m / √D, H_t = I − β_t w_t w_tᵀ, β_t = 2 σ(u_g·x_t +
    b_g).

    w_t = u_t / √(‖u_t‖² + 1e-6), u_t = silu(conv_3(W₂ W₁ x)), rank 32, for each key/value head.
    Yang et al. 2025, PaTH attention (arXiv:2505.16381), without the optional forgetting gate; the
    scale 1/√D multiplies the whole product, as in FLA's `naive_path_attn`. Tested against the
    explicit product; compared once with that function for the same w and β: outputs agree to 1e-6
    in float32. The computation of w is not compared with released code. Keys are cached unchanged;
    each pass computes the product by the UT transform, chunk by chunk, in time T·S·(D + chunk) and
    memory linear in S.
    """

    cached_form = "plain keys, directions w and strengths β"
    uses_position = False
    reads_features = True
    exempt: ClassVar[dict[str, str]] = {
        "window": "the product between two tokens depends on the tokens between them and, by "
        "convolution, "
        "on those just before"
    }
    settings: PathSettings

    def setup(self):
        """Strengths β start near 1 (projections)."""
        groups = self.geometry.kv_heads
        dim = self.geometry.dim
        features = groups * self.geometry.head_dim
        self._kept = features + groups  # extras besides the history
        rank = self.settings.rank
        width = self.settings.width
        self.down = self.learned((rank, dim), normal(dim**-0.5))  # W₁
        self.up = self.learned((features, rank), normal(rank**-0.5))  # W₂
        self.conv = self.learned((features, width), normal(width**-0.5))
        self.strength = self.learned((groups, dim), normal(0.1 * dim**-0.5))  # u
        self.strength_bias = self.learned((groups,), constant(0.0))  # b

    def features(self, x, tables):
        """(B, T, G + rank): strengths, and W₁ x."""
        strength = 2 * linear(x, self.strength, self.strength_bias).sigmoid()
        return torch.cat([strength, linear(x, self.down)], dim=-1)

    def accumulate(self, features, past, new, tables):
        """Directions w, strengths and the history of the convolution."""
        groups = self.geometry.kv_heads
        strength, down = features.tensor_split([groups], dim=-1)
        before = latest(past)
        history = None if before is None else before[:, self._kept :]
        series, kept_history = series_of(down, history, self.settings.width)
        w = F.silu(causal_convolution(linear(series, self.up), self.conv, new.order))
        w = unit(w.unflatten(-1, (groups, -1))).flatten(2)
        return torch.cat([w, strength, kept_history], dim=-1)

    def read(self, q, k, extras, plan):
        groups = self.geometry.kv_heads
        w, strength = extras[..., : self._kept].tensor_split([-groups], dim=-1)
        w = by_head(w, groups)  # (B, G, S, D)
        strength = strength.transpose(1, 2)[..., None]  # (B, G, S, 1)

        def weights_fn(block: QueryBlock) -> Tensor:
            heads = plan.context.heads
            own_w = repeated(w[:, :, block.keys], heads).to(block.q.dtype)
            own_strength = repeated(strength[:, :, block.keys], heads).to(block.q.dtype)
            scores = along_paths(block, own_w, own_strength)
            return block.weights_of(scores * block.scale)

        return [AttentionView(q, k, plan.mask, weights_fn)]


def along_paths(block: QueryBlock, w: Tensor, strength: Tensor) -> Tensor:
    """(B, H, t, s) q_nᵀ H_n ⋯ H_{m+1} k_m of a block; w is (B, H, s, D), strength (B, H, s, 1).

    Iterates over chunks of keys from last to first. In each chunk, with M = strictLower(diag(β) W
    Wᵀ) and Y = (Q Wᵀ)(I + M)⁻¹ diag(β), the scores are Q Kᵀ − Y strictLower(W Kᵀ) and the queries
    become Q − Y W; Q Wᵀ is lower triangular among the queries' own tokens. Other documents and
    padding need no mask: the product between two tokens contains only the tokens between them.
    """
    q = block.q
    k = block.k
    keys = block.keys
    mask = block.mask
    assert isinstance(keys, slice)  # without sinks
    own = mask.keys - mask.queries + block.start - keys.start  # the first query's own token
    edges = [own, *range(own - CHUNK, 0, -CHUNK), 0] if own else [0]
    parts: list[Tensor] = []
    stop = own + q.shape[2]
    future = k.shape[2] - stop
    for start in edges:
        here = slice(start, stop)
        w_here = w[:, :, here]
        k_here = k[:, :, here]
        strengths = strength[:, :, here]
        met = q @ w_here.mT
        met = met.tril() if start == own else met
        system = (strengths * (w_here @ w_here.mT)).tril(-1)
        y = torch.linalg.solve_triangular(
            system,
            met,
            upper=False,
            left=False,
            unitriangular=True,
        )
        y = y * strengths.mT
        parts.insert(0, q @ k_here.mT - y @ (w_here @ k_here.mT).tril(-1))
        q = q - y @ w_here
        stop = start
    return F.pad(torch.cat(parts, dim=-1), (0, future))


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
        self.angles = self.geometry.head_dim // 2  # per head

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

    def read(self, q, k, extras, plan):
        turned = self.write(q, plan.context.of_queries(extras), ())
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
    The formula has no bias b_g and starts at f = 1/(ln 2 + 1) = 0.5906, where RoPE has 0.7499 for D
    = 64; `start: paper` omits the bias. One f per key/value head. Tested against the formula above,
    not against released code.
    """

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
