"""Frequency rules for rotations: what happens to θ_k when a sequence is longer than the trained length.

Every rule maps the plain spectrum θ_k = b^(−2k/r) of r rotated dimensions to a new one and an amplitude
that multiplies both cos and sin. s is the stretch: the given factor, or max(1, L / L0) for ``factor: auto``,
with L the declared length of the sequence and L0 the original length.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from model.errors import ModelError

Factor = Annotated[float, Field(ge=1)] | Literal["auto"]


def plain_frequencies(theta: float, dims: int) -> Tensor:
    """(r/2,) float64, θ_k = b^(−2k/r) in radians per token. Su et al. 2021 (arXiv:2104.09864), eq. 15."""
    return theta ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)


class Scaling(BaseModel):
    """What the rules have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str

    def stretch(self, length: int, original_length: int) -> float:
        """s for a sequence of `length` tokens."""
        return 1.0

    def frequencies(
        self, theta: float, dims: int, stretch: float, original_length: int
    ) -> tuple[Tensor, float]:
        """(r/2,) float64 frequencies in radians per token, and the amplitude of cos and sin."""
        return plain_frequencies(theta, dims), 1.0


class NoScaling(Scaling):
    """Frequencies as trained."""

    name: Literal["none"] = "none"


class FactorScaling(Scaling):
    """A rule with a stretch factor."""

    factor: Factor = Field("auto", description="stretch s; auto: max(1, L / original_length)")

    def stretch(self, length: int, original_length: int) -> float:
        return max(1.0, length / original_length) if self.factor == "auto" else self.factor


class LinearScaling(FactorScaling):
    """Position interpolation, θ_k / s. Chen et al. 2023 (arXiv:2306.15595) eq. 3."""

    name: Literal["linear"] = "linear"

    def frequencies(self, theta, dims, stretch, original_length):
        return plain_frequencies(theta, dims) / stretch, 1.0


class NTKScaling(FactorScaling):
    """NTK-aware base change, b' = b·s^(r/(r−2)): the fastest pair is kept, the slowest divided by s.

    bloc97 2023; stated in Peng et al. 2023 (arXiv:2309.00071), eq. 16.
    """

    name: Literal["ntk"] = "ntk"

    def frequencies(self, theta, dims, stretch, original_length):
        if dims < 4:
            raise ModelError(f"ntk scaling needs at least 4 rotated dimensions, this model has {dims}")
        return plain_frequencies(theta * stretch ** (dims / (dims - 2)), dims), 1.0


class YaRNScaling(FactorScaling):
    """YaRN: fast pairs are kept, slow ones interpolated, a ramp between; logits get a temperature.

    Peng et al. 2023 (arXiv:2309.00071). Two ramps are in use and differ widely in mid frequencies: `dim` is
    linear in the pair's index, between the pairs that turn beta_fast and beta_slow times within L0 (the
    authors' code and Hugging Face); `wavelength` is linear in the number of turns (the paper, eq. 17-18).
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

    @model_validator(mode="after")
    def _betas_in_order(self):
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}")
        return self

    def frequencies(self, theta, dims, stretch, original_length):
        plain = plain_frequencies(theta, dims)
        keep = self._by_turns(plain, original_length)
        if self.ramp == "dim":
            keep = self._by_index(theta, dims, original_length)
        amplitude = self.attention_factor or 0.1 * math.log(stretch) + 1.0
        return plain * keep + plain / stretch * (1 - keep), amplitude

    def _by_turns(self, plain: Tensor, original_length: int) -> Tensor:
        turns = original_length * plain / (2 * math.pi)
        return ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)

    def _by_index(self, theta: float, dims: int, original_length: int) -> Tensor:
        def index(turns: float) -> float:
            """The (fractional) pair that makes this many turns within L0."""
            return dims * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        if low == high:
            high += 0.001
        k = torch.arange(dims // 2, dtype=torch.float64)
        return 1 - ((k - low) / (high - low)).clamp(0, 1)


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

    def frequencies(self, theta, dims, stretch, original_length):
        plain = plain_frequencies(theta, dims)
        turns = original_length * plain / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * keep + plain / stretch * (1 - keep), 1.0
