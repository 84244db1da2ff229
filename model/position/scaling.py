"""Frequency rules for rotations: what happens to θ_k when a sequence is longer than the trained length.

Every rule maps the spectrum θ_0, ..., θ_(R−1) of the R = r/2 rotated pairs to a new one and an amplitude that
multiplies both cos and sin. The spectrum is a geometric series, θ_0 = 1 and θ_k = b^(−2k/r) for plain RoPE; a
rule needs no more than that, and so works on any series that turns faster or slower as a whole.
s is the stretch: the given factor, or max(1, L / L0) for ``factor: auto``, with L the declared length of the
sequence and L0 the original length.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from model.errors import ModelError

Factor = Annotated[float, Field(ge=1)] | Literal["auto"]
Divisors = list[Annotated[float, Field(gt=0)]]


def stretch_of(factor: float | str, length: int, original_length: int) -> float:
    """s for a sequence of `length` tokens: the number given, or max(1, L / L0) for ``auto``."""
    return max(1.0, length / original_length) if isinstance(factor, str) else factor


def plain_frequencies(theta: float, dims: int) -> Tensor:
    """(r/2,) float64, θ_k = b^(−2k/r) in radians per token. Su et al. 2021 (arXiv:2104.09864), eq. 15."""
    return theta ** -(torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)


def critical_dimension(theta: float, dims: int, length: int) -> int:
    """How many of r rotated features belong to pairs that complete a turn within `length` tokens.

    D_c = 2⌈(r/2)·log_b(L0 / 2π)⌉, Liu et al. 2023 (arXiv:2310.05209); 92 of 128 for b 10000 and L0 4096. Past
    the trained length the other pairs meet angles they were never trained at.
    """
    pairs = math.ceil(dims / 2 * math.log(length / (2 * math.pi), theta))
    return 2 * min(max(pairs, 0), dims // 2)


def resonant(frequencies: Tensor) -> Tensor:
    """Frequencies whose wavelengths are whole numbers of tokens: 2π / round(2π / θ_k).

    Wang et al. 2024 (arXiv:2403.00071): a pair with λ_k ≤ L0 repeats exactly and meets no new angle after L0.
    Pairs that stand still (θ 0) go on doing so.
    """
    wavelengths = (2 * math.pi / frequencies).round().clamp(min=1)
    return 2 * math.pi / wavelengths


class Scaling(BaseModel):
    """What the rules have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str

    @property
    def follows_length(self) -> bool:
        """Whether the declared length of a sequence changes its frequencies."""
        return False

    @property
    def untouched(self) -> int:
        """Positions below this one turn as they were trained, whatever the rule does to the others."""
        return 0

    def stretch(self, length: int, original_length: int) -> float:
        """s for a sequence of `length` tokens."""
        return 1.0

    def frequencies(self, plain: Tensor, stretch: float, original_length: int) -> tuple[Tensor, float]:
        """(R,) float64 frequencies in radians per token from those as trained, and the amplitude."""
        return plain, 1.0

    def describe(self, length: int, original_length: int) -> str:
        """The rule as it treats a sequence of `length` tokens: `yarn s=4 (matched)`."""
        kind = "matched" if self.follows_length else "fixed"
        return f"{self.name} s={self.stretch(length, original_length):g} ({kind})"


class NoScaling(Scaling):
    """Frequencies as trained."""

    name: Literal["none"] = "none"


class DropScaling(Scaling):
    """DroPE, θ_k = 0: nothing turns, and the model is NoPE with the same weights.

    Gelberg et al. 2025 (arXiv:2512.12167). At test time it shows how much rests on positions; the method
    itself then trains a little longer at the original length.
    """

    name: Literal["drop"] = "drop"

    def frequencies(self, plain, stretch, original_length):
        return torch.zeros_like(plain), 1.0

    def describe(self, length, original_length):
        return self.name


class FactorScaling(Scaling):
    """A rule with a stretch factor."""

    factor: Factor = Field("auto", description="stretch s; auto: max(1, L / original_length)")

    @property
    def follows_length(self) -> bool:
        return self.factor == "auto"

    def stretch(self, length: int, original_length: int) -> float:
        return stretch_of(self.factor, length, original_length)


class LinearScaling(FactorScaling):
    """Position interpolation, θ_k / s. Chen et al. 2023 (arXiv:2306.15595) eq. 3."""

    name: Literal["linear"] = "linear"

    def frequencies(self, plain, stretch, original_length):
        return plain / stretch, 1.0


def change_base(plain: Tensor, stretch: float) -> Tensor:
    """θ_k·s^(−2k/(r−2)), which is the spectrum of base b·s^(r/(r−2))."""
    pairs = len(plain)
    if pairs < 2:
        raise ModelError(f"ntk scaling needs at least 4 rotated dimensions, this model has {2 * pairs}")
    return plain * stretch ** -(torch.arange(pairs, dtype=torch.float64, device="cpu") / (pairs - 1))


class NTKScaling(FactorScaling):
    """NTK-aware base change, b' = b·s^(r/(r−2)): the fastest pair is kept, the slowest divided by s.

    bloc97 2023; stated in Peng et al. 2023 (arXiv:2309.00071), eq. 16.
    """

    name: Literal["ntk"] = "ntk"

    def frequencies(self, plain, stretch, original_length):
        return change_base(plain, stretch), 1.0


class DynamicScaling(Scaling):
    """Dynamic NTK, b' = b·(f·L/L0 − (f − 1))^(r/(r−2)): NTK that follows the length; plain up to L0.

    emozilla 2023; the `dynamic` rule of Hugging Face. There L is the running length, and remembered keys go
    stale as the text grows. Here L is the declared length, chosen once per sequence, and the logits are those
    of a full pass over that length, cached or not.
    """

    name: Literal["dynamic"] = "dynamic"
    factor: float = Field(1.0, gt=0, description="f; 1 is `ntk` with factor auto, larger stretches faster")

    @property
    def follows_length(self) -> bool:
        return True

    def stretch(self, length, original_length):
        return 1 + self.factor * (max(length, original_length) / original_length - 1)

    def frequencies(self, plain, stretch, original_length):
        return change_base(plain, stretch), 1.0


def turns_within(plain: Tensor, length: int) -> Tensor:
    """(R,) how many times each pair turns within `length` tokens: L0 / λ_k."""
    return length * plain / (2 * math.pi)


def ramp_by_index(plain: Tensor, length: int, fast: float, slow: float, truncate: bool = True) -> Tensor:
    """(R,) 1 for pairs that turn more than `fast` times within `length`, 0 below `slow`, linear in k between.

    The ramp runs between the fractional indices at which a pair makes those numbers of turns, rounded
    outwards by `truncate` (jquesnelle/yarn `find_correction_range`, Hugging Face).
    """
    pairs = len(plain)
    if pairs < 2:
        raise ModelError(f"a ramp over pairs needs at least 4 rotated dimensions, this model has {2 * pairs}")
    turns, ratio = turns_within(plain, length), math.log(float(plain[0] / plain[1]))
    low, high = (math.log(float(turns[0]) / count) / ratio for count in (fast, slow))
    # The released code clamps an end past the last pair and then runs the ramp backwards.
    if high <= 0:
        return torch.zeros_like(plain)
    if low >= pairs - 1:
        return torch.ones_like(plain)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(pairs, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)


class ByPartsScaling(FactorScaling):
    """NTK-by-parts as first released: fast pairs are kept, middle ones get NTK's, slow ones are divided by s.

    bloc97 2023, LlamaPartNTKScaledRotaryEmbedding in jquesnelle/yarn. Two ramps: from divided to NTK between
    the pairs that turn 0.75 and 1.25 times within L0, from there to kept between 2 and 16 turns.
    """

    name: Literal["by_parts"] = "by_parts"

    def frequencies(self, plain, stretch, original_length):
        # β and γ of the released code, "found experimentally for LLaMA".
        ntk = ramp_by_index(plain, original_length, 1.25, 0.75)
        keep = ramp_by_index(plain, original_length, 16, 2)
        slow = plain / stretch * (1 - ntk) + change_base(plain, stretch) * ntk
        return slow * (1 - keep) + plain * keep, 1.0


class YaRNScaling(FactorScaling):
    """YaRN: fast pairs are kept, slow ones interpolated, a ramp between; logits get a temperature.

    Peng et al. 2023 (arXiv:2309.00071). Two ramps are in use and differ widely in mid frequencies: `dim` is
    linear in the pair's index, between the pairs that turn beta_fast and beta_slow times within L0 (the
    authors' code and Hugging Face); `wavelength` is linear in the number of turns (the paper, eq. 17-18).

    The temperature is stated once, as an amplitude a of cos and sin: logits of rotated features get a².
    DeepSeek also multiplies all logits by (0.1·mscale_all_dim·ln s + 1)²; here, as in Hugging Face, the
    mscales set the amplitude alone. Where all features are rotated, both together are attention_factor
    0.1·mscale·ln s + 1 (for mscale 1 the default), given in place of the mscales.
    """

    name: Literal["yarn"] = "yarn"
    beta_fast: float = Field(
        32.0, gt=0, description="pairs that turn more often than this within L0 are kept"
    )
    beta_slow: float = Field(1.0, gt=0, description="pairs that turn less often than this are divided by s")
    ramp: Literal["dim", "wavelength"] = Field("dim", description="ramp by pair index, or by number of turns")
    truncate: bool = Field(True, description="round the ends of the dim ramp outwards to whole pairs")
    attention_factor: float | None = Field(
        None, gt=0, description="amplitude of cos and sin; null: 0.1 ln s + 1 (logits get its square)"
    )
    mscale: float | None = Field(
        None,
        gt=0,
        description="with mscale_all_dim: amplitude (0.1 mscale ln s + 1) / (0.1 mscale_all_dim ln s + 1)",
    )
    mscale_all_dim: float | None = Field(None, gt=0, description="see mscale")

    @model_validator(mode="after")
    def _betas_in_order(self):
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}")
        return self

    @model_validator(mode="after")
    def _one_amplitude(self):
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                "mscale and mscale_all_dim are the two halves of one ratio: give both or neither"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError("attention_factor and mscale both set the amplitude: give one of them")
        return self

    def frequencies(self, plain, stretch, original_length):
        if self.ramp == "dim":
            keep = ramp_by_index(plain, original_length, self.beta_fast, self.beta_slow, self.truncate)
        else:
            turns = turns_within(plain, original_length)
            keep = ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        return plain * keep + plain / stretch * (1 - keep), self._amplitude(math.log(stretch))

    def _amplitude(self, log_stretch: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return 0.1 * log_stretch + 1
        return (0.1 * self.mscale * log_stretch + 1) / (0.1 * self.mscale_all_dim * log_stretch + 1)


class LongRoPEScaling(FactorScaling):
    """LongRoPE: θ_k / λ̂_k with searched divisors, one list up to L0 and one past it.

    Ding et al. 2024 (arXiv:2402.13753). The list is chosen by the declared length of the sequence, once, so
    that a text that grows past L0 keeps its frequencies; Hugging Face switches where the text crosses L0 and
    leaves stale keys. The amplitude √(1 + ln s / ln L0) is for both lists, as there; with factor auto it is 1
    up to L0. `first` is the paper's n̂; those positions keep amplitude 1 too, as in the authors' code. With
    `first` scores are no longer a function of distance alone.
    """

    name: Literal["longrope"] = "longrope"
    factor: Factor = Field(
        "auto", description="stretch s of the amplitude; auto: max(1, L / original_length)"
    )
    short_factor: Divisors | None = Field(
        None, description="divisor λ̂ of each pair up to original_length; null: as trained"
    )
    long_factor: Divisors = Field(
        description="divisor λ̂ of each pair past original_length, one number a pair"
    )
    first: int = Field(0, ge=0, description="this many first positions turn as trained (n̂ of the paper)")
    attention_factor: float | None = Field(
        None, gt=0, description="amplitude of cos and sin; null: √(1 + ln s / ln original_length)"
    )

    @property
    def follows_length(self) -> bool:
        return True

    @property
    def untouched(self) -> int:
        return self.first

    def stretch(self, length, original_length):
        return max(1.0, length / original_length)

    def frequencies(self, plain, stretch, original_length):
        for key, numbers in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if numbers is not None and len(numbers) != len(plain):
                raise ModelError(
                    f"longrope's {key} holds {len(numbers)} numbers, this model needs {len(plain)}: one for "
                    "each pair of rotated features"
                )
        divisors = self.long_factor if stretch > 1 else self.short_factor
        scaled = (
            plain if divisors is None else plain / torch.tensor(divisors, dtype=torch.float64, device="cpu")
        )
        if self.attention_factor is not None:
            return scaled, self.attention_factor
        s = stretch if self.factor == "auto" else self.factor
        return scaled, math.sqrt(1 + math.log(s) / math.log(original_length))


class Llama3Scaling(FactorScaling):
    """Llama 3.1: wavelengths below L0/high kept, above L0/low divided by s, blended between; no temperature.

    Meta's released code; the same in Hugging Face's `llama3` rule.
    """

    name: Literal["llama3"] = "llama3"
    low_freq_factor: float = Field(1.0, gt=0, description="wavelengths above L0 / this are divided by s")
    high_freq_factor: float = Field(4.0, gt=0, description="wavelengths below L0 / this are kept")

    @model_validator(mode="after")
    def _factors_in_order(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )
        return self

    def frequencies(self, plain, stretch, original_length):
        turns = turns_within(plain, original_length)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * keep + plain / stretch * (1 - keep), 1.0


AnyScaling = Annotated[
    NoScaling
    | LinearScaling
    | NTKScaling
    | DynamicScaling
    | ByPartsScaling
    | YaRNScaling
    | LongRoPEScaling
    | Llama3Scaling
    | DropScaling,
    Field(discriminator="name"),
]
