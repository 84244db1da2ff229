"""Schemes added to the token embedding: sinusoids, learned vectors, and simple baselines.

Each baseline is a step towards sinusoids and fails beyond the trained length for its own reason:
numbers grow without bound, fractions exceed 1 (or depend on the length), higher bits were never
set, slow sines are linear.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import ModelError
from model.position.interface import PositionalScheme, PositionSettings, TabulatedScheme, normal
from model.position.scaling import Factor, plain_frequencies, stretch_of
from model.position.table import Constant, Rows, StretchedTables, on_device
from model.token_positions import TokenPositions
from settings.fields import setting

INT64_BITS = 63  # bits of a position in int64, without the sign
# rows as large as token embeddings (1) would be noise that dominates the tokens in a short run
TABLE_STD = 0.02


class NoneSettings(PositionSettings):
    """No positional encoding (NoPE); order comes from the causal mask."""

    name: Literal["none"] = "none"


class IntegerSettings(PositionSettings):
    """The position, added to every feature."""

    name: Literal["integer"] = "integer"
    scale: float = setting(1.0, "the number added is scale × position", gt=0)
    direction: Literal["ones", "learned"] = setting(
        "ones",
        "add the number to all features, or along a learned vector",
    )


class UnitIntervalSettings(PositionSettings):
    """The position as a fraction of a length, added to every feature."""

    name: Literal["unit_interval"] = "unit_interval"
    denominator: Literal["fixed", "current"] = setting(
        "fixed",
        "fixed: the original length, so longer inputs exceed 1; current: the declared "
        "sequence length, so fractions stay below 1 but depend on the length",
    )


class BinarySettings(PositionSettings):
    """The bits of the position, most significant first, added to the last features."""

    name: Literal["binary"] = "binary"
    max_length: int | None = setting(
        None,
        "number of positions that must be representable, checked at model creation; "
        "null: the trained length",
        ge=1,
    )


class SineSettings(PositionSettings):
    """A sine of different frequency for each feature, without cosines."""

    name: Literal["sine"] = "sine"
    base: float | None = setting(
        None,
        "null: wavelengths double from feature to feature; b: they increase from 2π to 2π·b",
        gt=1,
    )


class SinusoidalSettings(PositionSettings):
    """Fixed sines and cosines added to the embeddings (Vaswani et al. 2017)."""

    test_time = PositionSettings.test_time | {"theta", "offset", "stretch"}

    name: Literal["sinusoidal"] = "sinusoidal"
    theta: float = setting(10_000.0, "base of the wavelengths, 2π to 2π·theta", gt=1)
    layout: Literal["interleaved", "half"] = setting(
        "interleaved",
        "alternate sin and cos, or all sines before all cosines",
    )
    scale_tokens: bool = setting(
        False,
        "multiply token embeddings by √dim first; for small, tied embeddings",
    )
    offset: int = setting(
        0,
        "added to every position; 2 in fairseq, whose padding has 0 and 1",
        ge=0,
    )
    stretch: Factor = setting(
        1.0,
        "positions are divided by this; auto: max(1, L / original_length)",
    )


class LearnedSettings(PositionSettings):
    """One learned vector per position, added to the embeddings."""

    test_time = PositionSettings.test_time | {"extend"}

    name: Literal["learned"] = "learned"
    max_length: int | None = setting(None, "rows of the table; null: the trained length", ge=1)
    extend: Literal["none", "interpolate", "repeat", "clip"] = setting(
        "none",
        "positions beyond the table: error; stretch the table over the declared "
        "length; wrap around to row 0; or use the last row",
    )


class NoPE(PositionalScheme):
    """NoPE: order comes from the causal mask alone, which suffices for two or more layers.

    Haviv et al. 2022 (arXiv:2203.16634); Kazemnejad et al. 2023 (arXiv:2305.19466). RoPE with all
    frequencies zero is the same function.
    """

    uses_position = False


class AdditiveEncoding(PositionalScheme):
    """x_n + p_n, with p_n (B or 1, T, C or 1) the scheme's one table.

    The sum is computed in the table's dtype and rounded once; in bfloat16, p_n would be rounded
    first.
    """

    def embed(self, x, tables, positions):
        return (x + tables[0]).to(x.dtype)


class IntegerEncoding(AdditiveEncoding):
    """x_n + scale·n·1: the same number on all features. A baseline without a paper.

    The number grows without bound. LayerNorm would remove it, as a constant over features; RMSNorm,
    which this model uses, does not. Large numbers dominate the token embedding, and bfloat16
    represents integers only up to 256. ``direction: learned`` adds scale·n·u instead, u (C,)
    initialized like token embeddings.
    """

    settings: IntegerSettings

    def setup(self):
        is_learned = self.settings.direction == "learned"
        self.direction = self.learned((self.geometry.dim,), normal(1.0)) if is_learned else None

    def initialize(self, generator, embedding_std):
        super().initialize(generator, embedding_std)
        if self.direction is not None:
            self.direction.data *= embedding_std

    def tables(self, positions, dtype):
        return ((positions.position.to(dtype) * self.settings.scale)[..., None],)

    def embed(self, x, tables, positions):
        added = tables[0] if self.direction is None else tables[0] * self.direction
        return super().embed(x, (added,), positions)


class UnitIntervalEncoding(AdditiveEncoding):
    """x_n + (n/N)·1: the same fraction on all features, 0 ≤ n/N < 1 within N. A baseline without a
    paper.

    ``denominator: fixed`` uses N = original_length for all evaluated lengths. ``current`` uses the
    declared length of each row, constant within a sequence: caches stay valid, but the encoding of
    a token depends on the total length. LayerNorm would remove either.
    """

    settings: UnitIntervalSettings

    @property
    def depends_on_length(self):
        return self.settings.denominator == "current"

    def tables(self, positions, dtype):
        lengths = positions.lengths if self.depends_on_length else (self.geometry.original_length,)
        position = positions.position.to(dtype)
        share = position / on_device(lengths, position.device, dtype)[:, None]  # (B or 1, T)
        return (share[..., None],)


class BinaryEncoding(AdditiveEncoding):
    """x_n + bits of n: feature C − 1 − k holds (n >> k) & 1. A baseline without a paper.

    Training on N positions uses the last ⌈log2 N⌉ features only; the others are zero except in
    longer inputs. Positions are limited to 2^C by the width.
    """

    settings: BinarySettings
    supports_fractions = False

    def setup(self):
        length = self.settings.max_length or self.geometry.train_length
        dim = self.geometry.dim
        needed = (length - 1).bit_length()  # ⌈log2 length⌉ without a logarithm's rounding
        if needed > dim:
            raise ModelError(
                f"position scheme 'binary' needs {needed} features for {length} positions, but "
                f"model.dim is {dim}: raise model.dim or reduce model.position.max_length (null: "
                "train_length)"
            )

    @property
    def limit(self):
        # Wider models can represent any 64-bit position.
        return 2**self.geometry.dim if self.geometry.dim < INT64_BITS else None

    def tables(self, positions, dtype):
        position = positions.position
        dim = self.geometry.dim
        count = min(dim, INT64_BITS)
        shifts = torch.arange(count - 1, -1, -1, device=position.device)
        bits = (position[..., None] >> shifts) & 1  # (B or 1, T, count)
        return (F.pad(bits, (dim - count, 0)).to(dtype),)


class SineEncoding(AdditiveEncoding, TabulatedScheme):
    """p_n[i] = sin(n/2^i), i = 0..C−1; with ``base`` b: sin(n·b^(−i/(C−1))). A baseline without a
    paper.

    Feature i repeats after 2π·2^i tokens. Without cosines, no linear map transforms p_n to p_(n+k),
    so distances are hard to compute; features far above log2 of the trained length are nearly
    linear, n/2^i.
    """

    settings: SineSettings

    def setup(self):
        base = self.settings.base
        dim = self.geometry.dim
        features = torch.arange(dim, dtype=torch.float64, device="cpu")
        self._speeds = Constant(
            torch.exp2(-features) if base is None else base ** -(features / max(dim - 1, 1))
        )

    def rows(self, positions):
        return (torch.sin(positions[..., None] * self._speeds.to(positions.device)),)


class Sinusoidal(PositionalScheme):
    """p_n[2k] = sin(m·b^(−2k/C)), p_n[2k+1] = cos(same), m = n/s + offset. Vaswani et al. 2017
    (arXiv:1706.03762), section 3.5; odd widths end with a sine.

    p_n·p_m = Σ_k cos(θ_k (n − m)), so inner products depend on distance alone. A stretch s
    interpolates positions as in Chen et al. 2023 (arXiv:2306.15595) before the offset is added:
    sequences of s·L0 tokens stay within the trained angles.
    """

    settings: SinusoidalSettings

    def setup(self):
        self._tables = StretchedTables(self._rows)

    @property
    def depends_on_length(self):
        return self.settings.stretch == "auto"

    def _rows(self, stretch: float) -> Rows:
        dim = self.geometry.dim
        offset = self.settings.offset
        speeds = Constant(plain_frequencies(self.settings.theta, dim))

        def rows(positions: Tensor) -> tuple[Tensor, ...]:
            # (..., ⌈C/2⌉)
            angles = (positions / stretch + offset)[..., None] * speeds.to(positions.device)
            if self.settings.layout == "half":
                features = torch.cat([angles.sin(), angles.cos()], dim=-1)
            else:
                features = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
            return (features[..., :dim],)

        return rows

    def tables(self, positions, dtype):
        given = self.settings.stretch
        original = self.geometry.original_length
        stretches = [stretch_of(given, length, original) for length in positions.lengths]
        return self._tables.look_up(positions, stretches, dtype)

    def embed(self, x, tables, positions):
        scaled = x * self.geometry.dim**0.5 if self.settings.scale_tokens else x
        return scaled + tables[0].to(x.dtype)


class Learned(PositionalScheme):
    """x_n + E[n], as in GPT-2 (Radford et al. 2019); E is initialized from N(0, 0.02²), small
    relative to token embeddings.

    Positions beyond the R rows of the table are an error, unless ``extend`` selects row n mod R
    (repeat), the last row (clip), or row r(n) of a table stretched over the declared length L > R
    (interpolate, as Dosovitskiy et al. 2020, arXiv:2010.11929, section 3.2): r(n) = n·(R − 1)/(L −
    1), with linear interpolation between rows ("align corners"). Up to R tokens nothing is
    stretched. Positions above L − 1 use the last row, those below 0 the first.

    Real-valued positions are supported with ``interpolate`` only.
    """

    supports_fractions = False  # by default
    fractions_hint = "use integer positions, or set model.position.extend to interpolate"
    settings: LearnedSettings

    def setup(self):
        rows = self.settings.max_length or self.geometry.train_length
        self.weight = self.learned((rows, self.geometry.dim), normal(TABLE_STD))
        self.supports_fractions = self.settings.extend == "interpolate"

    @property
    def limit(self):
        return self.weight.shape[0] if self.settings.extend == "none" else None

    @property
    def depends_on_length(self):
        return self.settings.extend == "interpolate"

    def tables(self, positions, dtype):
        """Row (B or 1, T) of each token; with ``interpolate`` two rows and the weight of the
        second."""
        position = positions.position
        rows = len(self.weight)
        match self.settings.extend:
            case "interpolate":
                return self._between(positions, dtype)
            case "repeat":
                return (position % rows,)
            case "clip":
                return (position.clamp(max=rows - 1),)
        return (position,)

    def _between(
        self,
        positions: TokenPositions,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        # r(n) = n·last/span, in integers until the last division, so that weights are exact.
        last = self.weight.shape[0] - 1
        device = positions.device
        spans = tuple(max(length - 1, last, 1) for length in positions.lengths)
        span = on_device(spans, device, torch.int64)[:, None]
        along = (positions.position * last).clamp(min=0)  # (B or 1, T), like all tensors here
        low = along.div(span, rounding_mode="floor")
        share = (along - low * span).to(dtype) / span
        low = low.long().clamp(max=last)
        return low, (low + 1).clamp(max=last), share[..., None]

    def embed(self, x, tables, positions):
        if len(tables) == 1:
            return x + self.weight[tables[0]].to(x.dtype)
        low, high, share = tables
        mixed = self.weight[low] * (1 - share) + self.weight[high] * share  # (B or 1, T, C)
        return x + mixed.to(x.dtype)
