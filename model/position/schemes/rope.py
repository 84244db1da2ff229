"""Rotary position embeddings (RoPE), with frequency scaling and position remaps, variants with
other frequencies, and the rotation by given angles that all rotary schemes share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor

from errors import ModelError
from model.attention.mask import AttentionMask, AttentionView, joined, mask_dtype, repeated
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    HeadGeometry,
    PositionalScheme,
    PositionSettings,
)
from model.position.remap import AnyRemap, NoRemap, RemapBranch, RemapContext
from model.position.scaling import AnyScaling, NoScaling, plain_frequencies, resonant
from model.position.table import Constant, Rows, StretchedTables
from settings.fields import counts_if_changed, setting

Layout = Literal["half", "interleaved"]
Share = Literal["model", "layer", "head"]
# factors of each feature and of its partner, each (B or 1, 1 or H, T, 2·R)
Factors = tuple[Tensor, Tensor]
Turns = tuple[Tensor, Tensor]  # cos and sin, each (B or 1, T, R), or (B or 1, G or H, T, R)


class RotationSettings(PositionSettings):
    """Settings of rotations whose initial frequencies are a geometric series."""

    theta: float = setting(10_000.0, "base b of the frequencies b^(−2k/r)", gt=1)
    layout: Layout = setting(
        "half",
        "features of a pair of r rotated ones: (k, k + r/2) or (2k, 2k + 1)",
    )


class AngleSharingSettings(PositionSettings):
    """Settings shared by schemes with learned angles."""

    share: Share = setting(
        "model",
        "one set of parameters per model, per layer, or per key/value head of each layer",
    )

    @property
    def per_layer(self):
        return self.share != "model"

    def shape(self, geometry: HeadGeometry, features: int) -> tuple[int, ...]:
        """(R,), or (G, R) if each key/value head has its own; q and k of a group share them."""
        return (geometry.kv_heads, features) if self.share == "head" else (features,)


def rotation_factors(cos: Tensor, sin: Tensor, layout: str) -> Factors:
    """The factors of each feature and of its partner in `apply_rotation`, computed once per pass.

    Args:
        cos, sin: (B or 1, T, R), or (B or 1, H, T, R) if heads differ.
        layout: ``half`` pairs feature k with k + R, ``interleaved`` pairs 2k with 2k + 1.

    Returns:
        cos and ∓sin for all features, each (B or 1, 1 or H, T, 2·R).
    """
    if cos.ndim == 3:
        cos = cos[:, None]
        sin = sin[:, None]
    # (B or 1, 1 or H, T, 2, R) or, interleaved, (B or 1, 1 or H, T, R, 2)
    pairs = -2 if layout == "half" else -1
    own = torch.stack([cos, cos], dim=pairs)
    # by a product: a stack of -sin and sin would be a kernel of its own in compiled decoding
    sign = torch.arange(-1, 2, 2, dtype=sin.dtype, device=sin.device)
    partner = torch.stack([sin, sin], dim=pairs) * (sign[:, None] if pairs == -2 else sign)
    return own.flatten(-2), partner.flatten(-2)


def apply_rotation(x: Tensor, factors: Factors, layout: str) -> Tensor:
    """Rotate the first 2·R features of each head of x (B, H, T, D); further features pass through.

    Args:
        factors: `rotation_factors`; float32 or float64, the dtype of the computation.

    Returns:
        (B, H, T, D) in the dtype of x.
    """
    own, partner = factors
    count = own.shape[-1]
    rotated = x[..., :count].to(own.dtype)
    if layout == "half":
        swapped = rotated.roll(count // 2, dims=-1)
    else:
        swapped = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    out = torch.addcmul(rotated * own, swapped, partner).to(x.dtype)
    return out if count == x.shape[-1] else torch.cat([out, x[..., count:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2·R features of each head of x (B, H, T, D), paired as k and k + R, by the
    angles of `rotation_factors`."""
    return apply_rotation(x, rotation_factors(cos, sin, "half"), "half")


def rotation_plan(
    context: AttentionContext,
    layout: str,
    keys: Turns,
    queries: Turns | None = None,
) -> AttentionPlan:
    """A plan in which keys are rotated by the cos and sin `keys` of the new tokens before they are
    cached; queries are rotated by the same, or by `queries`."""
    mask = context.mask()
    of_keys = rotation_factors(*keys, layout)
    of_queries = of_keys if queries is None else rotation_factors(*queries, layout)
    own, partner = (context.of_queries(x, dim=2) for x in of_queries)
    if own.shape[1] > 1:  # by key/value head, (B or 1, G, K, 2·R)
        own = repeated(own, context.heads)
        partner = repeated(partner, context.heads)

    def read(q: Tensor, k: Tensor) -> list[AttentionView]:
        return [AttentionView(apply_rotation(q, (own, partner), layout), k, mask)]

    return AttentionPlan(
        read,
        write=lambda k: apply_rotation(k, of_keys, layout),
        is_unordered=True,
        is_uniform=own.shape[:2] == of_keys[0].shape[:2] == (1, 1),
    )


def with_imaginary(plan: AttentionPlan, layout: str, rotated: int) -> AttentionPlan:
    """The plan with rotated queries of every second head turned by −90°."""

    def read(q: Tensor, k: Tensor) -> list[AttentionView]:
        dtype = mask_dtype(q)
        zeros = torch.zeros(1, 1, rotated // 2, dtype=dtype, device=q.device)
        quarter = rotation_factors(zeros, zeros - 1, layout)
        views = []
        for view in plan.read(q, k):
            turned = apply_rotation(view.q[:, 1::2], quarter, layout)
            both = torch.stack([view.q[:, 0::2], turned], dim=2).flatten(1, 2)
            views.append(replace(view, q=both))
        return views

    return replace(plan, read=read, is_uniform=False)


def check_even(scheme: PositionalScheme) -> None:
    """Raise ModelError for an odd head dimension."""
    head_dim = scheme.geometry.head_dim
    if head_dim % 2:
        raise ModelError(
            f"{scheme.settings.name} rotates pairs of features and requires an even head "
            f"dimension, got {head_dim}: change model.dim, model.heads or model.head_dim"
        )


class RotarySettings(RotationSettings):
    """Settings shared by all rotations with fixed frequencies."""

    test_time = RotationSettings.test_time | {"theta", "scaling", "resonance", "remap"}

    fraction: float = setting(
        1.0,
        "share of each head's features that is rotated (partial RoPE)",
        gt=0,
        le=1,
    )
    scaling: AnyScaling = setting(
        NoScaling(),
        "frequency scaling for lengths beyond the original length",
    )
    resonance: bool = setting(
        False,
        "round every wavelength to whole tokens, after scaling (Resonance RoPE)",
    )
    remap: AnyRemap = setting(
        NoRemap(),
        "remap of positions beyond the original length; does not change frequencies",
    )
    imaginary: bool = counts_if_changed(
        "every second head has the query of the head before it, rotated by 90° less (RoPE++)",
        False,
    )

    @property
    def heads_per_query(self):
        return 2 if self.imaginary else 1

    def spectrum(self, dims: int, original_length: int) -> Tensor:
        """(dims/2,) float64 frequencies before scaling, in radians per token: a geometric
        series."""
        return plain_frequencies(self.theta, dims)

    def reduced(self, length, original_length):
        changes = {}
        scaling = self.scaling
        plain = self.spectrum(2 * (scaling.pairs or 512), original_length)
        scaled, amplitude = scaling.frequencies(
            plain,
            scaling.stretch(length, original_length),
            original_length,
        )
        # up to the rounding of interpolation
        is_plain = torch.allclose(scaled, plain, rtol=1e-12, atol=0)
        if is_plain and amplitude == 1 and not scaling.untouched:
            changes["scaling"] = NoScaling()
        if self.remap.keeps(length, RemapContext(original_length, self.window, self.sinks)):
            changes["remap"] = NoRemap()
        kept = self.model_copy(update=changes)
        if kept.remap.needs_sinks:  # it depends on window and sinks
            return kept
        return super(RotarySettings, kept).reduced(length, original_length)

    @model_validator(mode="after")
    def _remap_is_possible(self):
        if self.scaling.untouched and not isinstance(self.remap, NoRemap):
            raise ValueError(
                f"scaling.first {self.scaling.untouched} makes scores depend on more than the "
                f"distance, which remap '{self.remap.name}' does not support: set one of them to "
                "0 or none"
            )
        if self.remap.needs_sinks and (self.window is None or self.sinks == 0):
            raise ValueError(f"remap '{self.remap.name}' requires window and sinks")
        return self


class RopeSettings(RotarySettings):
    """Rotary position embeddings: q and k are rotated by angles proportional to position (Su et al.
    2021)."""

    name: Literal["rope"] = "rope"


class Rope(PositionalScheme):
    """RoPE, Su et al. 2021 (arXiv:2104.09864): q_n → R(nθ) q_n, k_m → R(mθ) k_m, scores depend on n
    − m only.

    The table of cos and sin is indexed by position, so it is valid at any cache offset. Keys are
    cached rotated, once per key map of the remap; frequencies and maps do not change within a
    sequence.

    With `imaginary` it is RoPE++, Liu et al. 2025 (arXiv:2512.07525): heads 2h and 2h + 1 have the
    same query q, and scores Re and Im of Σ_k q_k k̄_k e^(idθ_k), pairs of features as complex
    numbers. H counts both: RoPE++_EC has twice the heads of the RoPE model that it is compared
    with, RoPE++_EH half of its key/value heads.
    """

    cached_form = "rotated keys, one form for each key map of the remap"

    settings: RotarySettings

    def setup(self):
        settings = self.settings
        geometry = self.geometry
        check_even(self)
        self.dims = int(geometry.head_dim * settings.fraction) // 2 * 2
        if self.dims < 2:
            raise ModelError(
                f"model.position.fraction {settings.fraction} of {geometry.head_dim} features "
                f"leaves no pair: raise it to {2 / geometry.head_dim:.4g} or more"
            )
        self.frequencies(self.stretch(geometry.train_length))  # validates the settings
        self._remap_context = RemapContext(
            geometry.original_length,
            settings.window,
            settings.sinks,
        )
        self._branches = settings.remap.branches(self._remap_context)
        # key maps; keys are cached once for each
        self._forms = sorted({branch.key for branch in self._branches})
        self._tables = StretchedTables(self._rows)
        # stretches of every sequence; None: they depend on its declared length
        self._stretches = None
        if not self.depends_on_length:
            self._stretches = self._stretches_of(geometry.train_length)

    def stretch(self, length: int) -> float:
        """The scaling factor for a sequence of this declared length."""
        return self.settings.scaling.stretch(length, self.geometry.original_length)

    def _stretches_of(self, length: int) -> tuple[float, float]:
        """The stretch of the scaling and that of the remap."""
        return self.stretch(length), self.settings.remap.stretch(length, self._remap_context)

    @property
    def exempt(self) -> dict[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.settings.remap.exempt

    @property
    def key_features(self):
        return self.geometry.head_dim * len(self._forms)

    @property
    def depends_on_length(self):
        return self.settings.scaling.depends_on_length or self.settings.remap.depends_on_length

    def spectrum(self) -> Tensor:
        """(R,) float64 frequencies before scaling, in radians per token."""
        return self.settings.spectrum(self.dims, self.geometry.original_length)

    def rotated_pairs(self) -> Tensor | float:
        """(R,) 1 for pairs that are rotated, 0 for pairs that are never rotated, even after
        scaling."""
        return 1.0

    def frequencies(self, stretch: float) -> tuple[Tensor, float]:
        """(R,) float64 frequencies in radians per token, and the amplitude of cos and sin."""
        scaled, amplitude = self.settings.scaling.frequencies(
            self.spectrum(),
            stretch,
            self.geometry.original_length,
        )
        return self._rotating(scaled), amplitude

    def _rotating(self, frequencies: Tensor) -> Tensor:
        """The frequencies with resonance, and 0 for pairs that are not rotated."""
        if self.settings.resonance:
            frequencies = resonant(frequencies)
        return frequencies * self.rotated_pairs()

    def _rows(self, stretches: tuple[float, float]) -> Rows:
        stretch, remap_stretch = stretches
        remap = self.settings.remap
        gain = remap.amplitude(remap_stretch)
        frequencies, amplitude = self.frequencies(stretch)
        untouched = self.settings.scaling.untouched
        scaled = Constant(frequencies)
        plain = Constant(self._rotating(self.spectrum()))

        def turns(positions: Tensor) -> tuple[Tensor, Tensor]:
            positions = positions[..., None]
            angles = positions * scaled.to(positions.device)
            cos = angles.cos() * amplitude
            sin = angles.sin() * amplitude
            if untouched:
                early = positions < untouched
                angles = positions * plain.to(positions.device)
                cos = torch.where(early, angles.cos(), cos)
                sin = torch.where(early, angles.sin(), sin)
            return cos, sin

        def rows(positions: Tensor) -> tuple[Tensor, ...]:
            """cos and sin for the first map, for the second, ..."""
            maps = remap.maps(positions, remap_stretch, self._remap_context)
            return tuple(x * gain for mapped in maps for x in turns(mapped))

        return rows

    def tables(self, positions, dtype):
        stretches = [self._stretches or self._stretches_of(n) for n in positions.lengths]
        return self._tables.look_up(positions, stretches, dtype)

    def plan(self, context):
        layout = self.settings.layout
        by_map = zip(context.tables[0::2], context.tables[1::2], strict=True)
        keys = [rotation_factors(cos, sin, layout) for cos, sin in by_map]
        queries = {}
        for branch in self._branches:
            cos, sin = keys[branch.query]
            queries[branch.query] = (context.of_queries(cos, dim=2), context.of_queries(sin, dim=2))
        masks = [self._mask(context, branch) for branch in self._branches]

        def write(k: Tensor) -> Tensor:
            return joined([apply_rotation(k, keys[i], layout) for i in self._forms], -1)

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            split = k.split(self.geometry.head_dim, dim=-1) if len(self._forms) > 1 else (k,)
            forms = dict(zip(self._forms, split, strict=True))
            return [
                AttentionView(
                    apply_rotation(q, queries[branch.query], layout),
                    forms[branch.key],
                    mask,
                )
                for branch, mask in zip(self._branches, masks, strict=True)
            ]

        is_plain = len(self._branches) == 1
        plan = AttentionPlan(
            read,
            write,
            is_unordered=is_plain,
            is_uniform=is_plain and len(keys[0][0]) == 1,  # one stretch for all rows
        )
        return with_imaginary(plan, layout, self.dims) if self.settings.imaginary else plan

    def _mask(
        self,
        context: AttentionContext,
        branch: RemapBranch,
    ) -> AttentionMask:
        covers = branch.covers
        if covers is None:
            return context.mask()
        q_position = context.q_position
        k_position = context.k_position
        k_order = context.k_order
        return context.mask(
            mask_mod=lambda b, h, i, j: covers(q_position[b, i], k_position[b, j], k_order[b, j])
        )


class HeXuSettings(RotarySettings):
    """Rotary positions with angles below π/2 within max_length (He and Xu)."""

    name: Literal["he_xu"] = "he_xu"
    max_length: int | None = setting(
        None,
        "N of the angle π/(2N), fixed after training; null: original_length",
        ge=1,
    )

    def spectrum(self, dims, original_length):
        length = self.max_length or original_length
        return super().spectrum(dims, original_length) * (math.pi / (2 * length))


class HeXu(Rope):
    """θ_k = π/(2N)·b^(−2k/r): "Easy Derivation Of Rotary Position Embeddings", He Cangping and Xu
    Tao.

    Within N tokens, cos(d·θ_k) decreases with the distance d for all k. Equivalent to RoPE with
    positions divided by 2N/π (1303.8 for N 2048). N is fixed after training; changing it would
    interpolate positions.
    """

    settings: HeXuSettings


class PRopeSettings(RotarySettings):
    """Rotary positions for the pairs with the highest frequencies only (Barbero et al. 2024)."""

    # Another base could change which pairs are within max_wavelength; scaling does not.
    test_time = RotarySettings.test_time - {"theta"}

    name: Literal["p_rope"] = "p_rope"
    share: float = setting(
        0.75,
        "fraction p of the pairs that is rotated: pairs of highest frequency",
        gt=0,
        le=1,
    )
    reversed: bool = setting(False, "rotate the pairs of lowest frequency instead")
    max_wavelength: float | None = setting(
        None,
        "longest rotated wavelength, as a multiple of original_length; null: unlimited",
        gt=0,
    )


class PRope(Rope):
    """p-RoPE: θ_k = b^(−2k/r) for the first ⌊p·r/2⌋ pairs, 0 for the rest.

    Barbero et al. 2024 (arXiv:2410.06205). Unlike rope.fraction, the exponents are over all r
    features. Scaling methods apply to the full spectrum, as in RoPE. `max_wavelength: 1` with
    `share: 1` is HoPE, Chen et al. 2024 (arXiv:2410.21216): only pairs with λ_k ≤ L0 rotate. The
    threshold is from secondary descriptions of the paper.
    """

    settings: PRopeSettings

    def setup(self):
        super().setup()
        if not self.rotated_pairs().any():
            raise ModelError(
                f"p_rope rotates no pair of {self.dims} features: raise share "
                f"({self.settings.share}) or max_wavelength ({self.settings.max_wavelength})"
            )

    def rotated_pairs(self):
        s = self.settings
        spectrum = self.spectrum()
        count = int(s.share * self.dims // 2)
        indices = torch.arange(len(spectrum), device="cpu")
        rotated = indices >= len(spectrum) - count if s.reversed else indices < count
        if s.max_wavelength is not None:
            # The trained frequencies, so that scaling does not change the selection.
            rotated &= 2 * torch.pi / spectrum <= s.max_wavelength * self.geometry.original_length
        return rotated.double()
