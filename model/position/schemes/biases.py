"""Biases of distance: ALiBi, T5, KERPLE, Sandwich and FIRE, and hard ALiBi, a window for each
head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from errors import ModelError
from model.attention.mask import AttentionView, BiasForms, BiasFunction, no_autocast, precise
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    PositionSettings,
    SharableSettings,
    constant,
    normal,
    uniform,
)
from model.position.pairwise import pair_blocks, pair_product
from model.position.scaling import Factor, plain_frequencies, stretch_of
from model.position.table import Rows, StretchedTables, on_device
from model.token_positions import TokenPositions
from settings.fields import setting

# (row, head, distance), index tensors and the unstretched distance -> added to the logit. The row
# indexes the scheme's first table. FlexAttention requires that tensors are indexed by tensors.
RowBias = Callable[[Tensor, Tensor, Tensor], Tensor]


class DistanceSettings(PositionSettings):
    """Settings shared by distance biases."""

    test_time = PositionSettings.test_time | {"stretch"}

    stretch: Factor = setting(
        1.0,
        "distances are divided by this; auto: max(1, L / original_length)",
    )


class DistanceBias(PositionalScheme, ABC):
    """logit += f_h(d / s), after the 1/√D scale; s stretches the trained distances over longer
    sequences.

    Al-Khateeb et al. 2023 (arXiv:2310.13017) divide ALiBi's slopes by s = L / L0 at test time.
    """

    settings: DistanceSettings
    tabulate: bool = True  # the bias is computed once per distance rather than for each pair

    @property
    def depends_on_length(self):
        return self.settings.stretch == "auto"

    def stretches(self, positions: TokenPositions) -> tuple[float, ...]:
        """s of each row, or a single value if all rows agree."""
        original = self.geometry.original_length
        stretch = self.settings.stretch
        by_row = tuple(stretch_of(stretch, length, original) for length in positions.lengths)
        return by_row[:1] if len(set(by_row)) == 1 else by_row

    def tables(self, positions, dtype):
        """(B or 1,) the stretch of each row, and constants."""
        stretches = on_device(self.stretches(positions), positions.device, dtype)
        return stretches, *super().tables(positions, dtype)

    @abstractmethod
    def bias(self, context: AttentionContext) -> RowBias:
        """The bias function f of this pass."""

    def plan(self, context):
        bias = self.bias(context)

        def by_distance(h, d):
            return bias(h * 0, h, d)

        if context.tables[0].shape[0] == 1:
            mask = context.distance_mask(by_distance, tabulate=self.tabulate)
            return AttentionPlan.from_mask(mask)
        separation = context.separation()

        def by_pair(b, h, i, j):
            return bias(b, h, separation(b, i, j))

        return AttentionPlan.from_mask(context.mask(bias=by_pair, by_row=True))


def two_layers(x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor) -> Tensor:
    """outer (O, W) times relu(inner (W, I) times x (I, N) + bias (W, 1)), for each of the N pairs:
    (O, N)."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return TwoLayers.apply(x, inner, bias, outer)
    return pair_product(outer, pair_product(inner, x, bias).relu())


class TwoLayers(torch.autograd.Function):
    """`two_layers` in blocks of pairs whose hidden features stay in a CPU cache; the backward pass
    computes them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor) -> Tensor:
        ctx.save_for_backward(x, inner, bias, outer)
        out = x.new_empty(len(outer), x.shape[1])
        for part in pair_blocks(x):
            hidden = pair_product(inner, x[:, part], bias).relu_()
            out[:, part] = pair_product(outer, hidden)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        saved = ctx.saved_tensors
        x, inner, bias, outer = saved
        of_x, of_inner, of_bias, of_outer = map(torch.zeros_like, saved)
        for part in pair_blocks(x):
            gradient = gradients[0][:, part]
            hidden = pair_product(inner, x[:, part], bias).relu_()
            of_outer += pair_product(gradient, hidden.T)
            of_hidden = torch.ops.aten.threshold_backward(
                pair_product(outer.T, gradient),
                hidden,
                0.0,
            )
            of_inner += pair_product(of_hidden, x[:, part].T)
            of_bias += of_hidden.sum(1, keepdim=True)
            of_x[:, part] = pair_product(inner.T, of_hidden)
        return of_x, of_inner, of_bias, of_outer


class AlibiSettings(DistanceSettings):
    """A penalty linear in distance, with a fixed slope per head (Press et al. 2021)."""

    test_time = DistanceSettings.test_time | {"slopes"}

    name: Literal["alibi"] = "alibi"
    slopes: list[Annotated[float, Field(ge=0)]] | None = setting(
        None,
        "slope of each head in logits per token; null: geometric, 2^(−8/H) to 2^(−8)",
    )
    learned: bool = setting(
        False,
        "learn the slopes, initialized to the geometric ones; worse in the paper",
    )
    shared: bool = setting(True, "share learned slopes between layers")

    @model_validator(mode="after")
    def _slopes_are_given_or_learned(self):
        if self.learned and self.slopes is not None:
            raise ValueError(
                "slopes cannot be set with learned: true; remove slopes or set learned to false"
            )
        return self

    @property
    def per_layer(self):
        return self.learned and not self.shared


def alibi_slopes(heads: int) -> Tensor:
    """(H,) float64 slopes: 2^(−8(h+1)/H) for H a power of two, else those of the power of two below
    it, followed by every second slope of the power of two above. Press et al. 2021, released
    code."""

    def geometric(count: int) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, count + 1, dtype=torch.float64) / count)

    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return geometric(heads)
    return torch.cat([geometric(power), geometric(2 * power)[0::2][: heads - power]])


class Alibi(DistanceBias):
    """logit −= slope_h · d / s, after the 1/√D scale. Press, Smith, Lewis 2021 (arXiv:2108.12409),
    section 3.

    The stretch s is 1 in training; at test time it interpolates (Al-Khateeb et al. 2023,
    arXiv:2310.13017).
    """

    settings: AlibiSettings

    def setup(self):
        super().setup()
        given = self.settings.slopes
        heads = self.geometry.heads
        if given is not None and len(given) != heads:
            raise ModelError(
                f"model.position.slopes must have one slope per head ({heads}), got {len(given)}"
            )
        fixed = alibi_slopes(heads) if given is None else torch.tensor(given, dtype=torch.float64)
        self.slopes = self.learned((heads,), constant(fixed)) if self.settings.learned else None
        if self.slopes is None:
            self.constant_table(fixed)

    @property
    def tabulate(self):
        return self.slopes is not None

    def bias(self, context):
        stretch = context.tables[0]
        slopes = context.tables[1] if self.slopes is None else precise(self.slopes)
        return lambda row, h, d: -slopes[h] * d / stretch[row]


class HardAlibiSettings(PositionSettings):
    """A window of its own for each head, without positions otherwise (Jelassi et al. 2024)."""

    name: Literal["hard_alibi"] = "hard_alibi"
    windows: list[Annotated[int, Field(ge=1)] | None] | None = setting(
        None,
        "for each head, the number of most recent positions it attends to, the "
        "query's own included, or null for all; null: 1, 2, ... for the first half of the heads, "
        "all for the others",
    )


class HardAlibi(PositionalScheme):
    """logit = q·k for distances below m_h, −∞ beyond; NoPE in heads without m_h.

    Jelassi et al. 2024, "Repeat After Me" (arXiv:2402.01032), section 3: m_h = 1, ..., M in M heads
    and no limit in the others. Such heads read the tokens right before a match, which copies of any
    length need. With `window`, the smaller of both applies; sinks stay visible where m_h allows.
    """

    settings: HardAlibiSettings

    def setup(self):
        heads = self.geometry.heads
        given = self.settings.windows
        if given is None:
            given = [h + 1 if h < heads // 2 else None for h in range(heads)]
        if len(given) != heads:
            raise ModelError(
                f"model.position.windows must have one entry per head ({heads}), got {len(given)}"
            )
        reach = [math.inf if window is None else window for window in given]
        self.constant_table(torch.tensor(reach, dtype=torch.float64))

    def plan(self, context):
        (reach,) = context.tables  # (H,) number of positions that each head attends to
        return AttentionPlan.from_mask(
            context.distance_mask(lambda h, d: torch.where(d < reach[h], 0.0, -math.inf))
        )


class T5Settings(SharableSettings):
    """A learned bias per bucket of distances and head (Raffel et al. 2019)."""

    test_time = SharableSettings.test_time | {"max_distance"}

    name: Literal["t5"] = "t5"
    buckets: int = setting(
        32,
        "number of buckets; those of the first half have one distance each",
        ge=2,
    )
    max_distance: int = setting(
        128,
        "distances from here on are in the last bucket; must exceed buckets / 2",
        ge=1,
        le=1_000_000,
    )
    shared: bool = setting(True, "share the learned parameters between all layers")
    unscaled: bool = setting(
        False,
        "omit the factor 1/√D on q·k, as in T5, whose queries are initialized smaller",
    )

    @model_validator(mode="after")
    def _far_buckets_have_distances(self):
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"max_distance {self.max_distance} must exceed {self.buckets // 2}, half of "
                "buckets: the first half hold one distance each; raise max_distance or lower "
                "buckets"
            )
        return self


def bucket_of(distance: int, buckets: int, max_distance: int) -> int:
    """d below E = ⌊buckets/2⌋, then E + ⌊ln(d/E) / ln(max_distance/E) · (buckets − E)⌋ up to
    buckets − 1."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))


class T5(PositionalScheme):
    """logit += table[bucket(d), h], after the 1/√D scale; distances below buckets/2 have one bucket
    each, larger ones share buckets on a logarithmic scale. Raffel et al. 2019 (arXiv:1910.10683),
    section 2.1; released code, `bidirectional=False`.

    Future keys use distance 0. Buckets are looked up in an integer table, computed in float64. T5
    shares the table between layers and has no factor 1/√D: ``shared`` and ``unscaled``. Positions
    must be integers.
    """

    supports_fractions = False
    settings: T5Settings

    def setup(self):
        s = self.settings
        geometry = self.geometry
        # as in T5
        self.weight = self.learned((s.buckets, geometry.heads), normal(geometry.dim**-0.5))
        buckets = [bucket_of(d, s.buckets, s.max_distance) for d in range(s.max_distance + 1)]
        self.constant_table(torch.tensor(buckets), keep_dtype=True)

    def plan(self, context):
        (buckets,) = context.tables  # (max_distance + 1,) bucket of each distance
        weight = precise(self.weight)
        last = self.settings.max_distance

        def bias(h: Tensor, d: Tensor) -> Tensor:
            return weight[buckets[d.clamp(0, last)], h]

        mask = context.distance_mask(bias, tabulate=True)
        if not self.settings.unscaled:
            return AttentionPlan.from_mask(mask)
        root = self.geometry.head_dim**0.5
        return AttentionPlan(read=lambda q, k: [AttentionView(q * root, k, mask)])


SMALLEST = 1e-2  # minimum of all learned parameters, as in the released code
LARGEST_POWER = 2.0  # beyond it the kernel is no longer conditionally positive definite

# For each form and parameter: range of its uniform initialization (low, high), and its maximum.
RANGES: dict[str, dict[str, tuple[float, float, float | None]]] = {
    "log": {"r1": (0.0, 2.0, None), "r2": (0.0, 1.0, None)},
    "power": {"r1": (0.0, 1.0, None), "r2": (0.0, 2.0, LARGEST_POWER)},
    "log3": {"r1": (0.0, 2.0, None), "r2": (0.0, 1.0, None), "r3": (1.0, 1.0, LARGEST_POWER)},
}


class KerpleSettings(DistanceSettings, SharableSettings):
    """A learned penalty per head that grows with the logarithm or a power of distance (Chi et al.
    2022)."""

    name: Literal["kerple"] = "kerple"
    form: Literal["log", "power", "log3"] = setting(
        "log",
        "r1·ln(1 + r2·d), r1·d^r2 or r1·ln(1 + r2·d^r3)",
    )
    shared: bool = setting(True, "share the learned parameters between all layers")


def power_of(d: Tensor, exponent: Tensor) -> Tensor:
    """d^exponent for d ≥ 0 and exponents above 0: exactly 0 at 0, with a finite gradient there."""
    beyond = d > 0
    return torch.where(beyond, torch.where(beyond, d, 1.0) ** exponent, 0.0)


class Kerple(DistanceBias):
    """log: −r1·ln(1 + r2·d); power: −r1·d^r2; log3: −r1·ln(1 + r2·d^r3), with d = |i − j| / s.

    Chi et al. 2022 (arXiv:2205.09921): the logarithmic, power and 3-parameter-log kernels. Per head
    r1, r2, r3 ≥ 1e-2, and the exponents (r2 of power, r3 of log3) are at most 2. As in the released
    code, the parameters themselves are clamped to these ranges before each training pass, so that
    clamped parameters still get gradients. Initialized as in the released code: log r1 ~ U(0, 2),
    r2 ~ U(0, 1); power r1 ~ U(0, 1) and the exponent ~ U(0, 2). log3, which has no released code,
    is initialized as log: r3 = 1.
    """

    settings: KerpleSettings

    def setup(self):
        super().setup()
        self._ranges = RANGES[self.settings.form]
        for name, (low, high, _) in self._ranges.items():
            self.register_parameter(name, self.learned((self.geometry.heads,), uniform(low, high)))

    def tables(self, positions, dtype):
        if self.training and torch.is_grad_enabled():
            for name, (_, _, largest) in self._ranges.items():
                # `.data` avoids autograd's version check: the backward of another pass may be
                # pending.
                self.get_parameter(name).data.clamp_(SMALLEST, largest)
        return super().tables(positions, dtype)

    def _values(self) -> list[Tensor]:
        # Clamp before the cast: a parameter at its limit must get a gradient.
        return [
            precise(self.get_parameter(name).clamp(SMALLEST, largest))
            for name, (_, _, largest) in self._ranges.items()
        ]

    def bias(self, context):
        stretch = context.tables[0]
        r1, r2, *more = self._values()
        form = self.settings.form

        def bias(row, h, d):
            d = d.abs()
            if form == "log":
                return -r1[h] * torch.log1p(r2[h] * d / stretch[row])
            d = d / stretch[row]
            if form == "power":
                return -r1[h] * power_of(d, r2[h])
            return -r1[h] * torch.log1p(r2[h] * power_of(d, more[0][h]))

        return bias


# minimum number of distances; doubled as needed, to limit the number of table shapes
SMALLEST_TABLE = 512


class SandwichSettings(DistanceSettings):
    """The inner product of two sinusoidal embeddings, as a bias (Chi et al. 2022)."""

    name: Literal["sandwich"] = "sandwich"
    dims: int = setting(128, "width d̄ of the sinusoidal embeddings", ge=2, le=65_536, multiple_of=2)


class Sandwich(DistanceBias):
    """logit += c_h · Σ_{k < d̄/2} cos(d·10000^(−2k/d̄) / s), c_h = H / (8(h + 1)), h from 0.

    Chi et al. 2022 (arXiv:2212.10356), section 5. No parameters. Unlike ALiBi, the bias is bounded,
    so distant keys keep some weight. The head factor c_h was verified with attention-gym's code
    only (`attn_gym/mods/sandwich.py`), not with the paper's text.
    """

    settings: SandwichSettings
    tabulate = False  # `tables` are by distance already

    def setup(self):
        super().setup()
        heads = self.geometry.heads
        self._theta = plain_frequencies(10_000.0, self.settings.dims)
        self._sums = StretchedTables(self._rows)
        self.constant_table(heads / (8.0 * torch.arange(1, heads + 1, dtype=torch.float64)))

    def _sum(self, d: Tensor) -> Tensor:
        """Σ_k cos(d θ_k), one frequency at a time, which limits memory for millions of
        distances."""
        total = torch.zeros_like(d)
        for theta in self._theta.tolist():
            total = total + (d * theta).cos()
        return total

    def _rows(self, stretch: float) -> Rows:
        return lambda distances: (self._sum(distances / stretch),)

    def tables(self, positions, dtype):
        """The stretches (B or 1,), for fractional distances; factors (H,); sums (B or 1, N) for
        distances 0 to N − 1, computed in float64."""
        device = positions.device
        stretches = self.stretches(positions)
        size = max(SMALLEST_TABLE, 1 << (positions.position_end - 1).bit_length())
        distances = replace(
            positions,
            position=torch.arange(size, device=device)[None],
            position_end=size,
        )
        sums = self._sums.look_up(distances, list(stretches), dtype)
        return super().tables(positions, dtype) + sums

    def bias(self, context):
        stretch, factors, sums = context.tables
        size = sums.shape[1]
        flat = sums.flatten()

        def bias(row, h, d):
            if d.is_floating_point():
                return factors[h] * self._sum(d / stretch[row])
            return factors[h] * flat[row * size + d.abs().clamp(max=size - 1)]

        return bias


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

        The segment of x is that of the start of its cell, 1/CELLS wide, and one or two later. With
        three edges in one cell, the bias may continue a neighboring segment within that cell.
        Intercepts and slopes have COPIES entries for each segment, which keys use in turn:
        gradients of neighboring keys are added to different entries.
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
                s = s + torch.where(edges[s] <= x, 1, 0)
            copy = j % COPIES
            return intercept[h, s, copy] + slope[h, s, copy] * x

        return bias

    def plan(self, context):
        q_position = context.q_position
        separation = context.separation()

        def bias(b, h, i, j):
            x = self.near(separation(b, i, j)) / self.far(q_position[b, i])
            return self.network(x, h.flatten())

        forms = BiasForms(
            make_flex=lambda: self._flex_bias(context),
            # With more stages Triton buffers the look-ups of the next keys, in 475 kB of shared
            # memory.
            kernel_options={"num_stages": 1},
        )
        return AttentionPlan.from_mask(context.mask(bias=bias, forms=forms))
