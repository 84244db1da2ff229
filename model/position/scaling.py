"""Frequency scaling of rotary embeddings for sequences longer than the trained length.

A scaling method maps the frequencies θ_0, ..., θ_(R−1) of the R = r/2 rotated pairs to new ones,
and returns an amplitude that multiplies cos and sin. The frequencies are a geometric series, θ_0 =
1 and θ_k = b^(−2k/r) for plain RoPE; the methods work for any geometric series. s is the stretch:
the given factor, or max(1, L / L0) for ``factor: auto``, with L the declared length of the sequence
and L0 the original length.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from errors import ModelError
from settings.fields import StrictSettings, setting

Factor = Annotated[float, Field(ge=1)] | Literal["auto"]
Divisors = list[Annotated[float, Field(gt=0)]]


def stretch_of(factor: float | str, length: int, original_length: int) -> float:
    """s for a sequence of `length` tokens: `factor`, or max(1, L / L0) for ``auto``."""
    return max(1.0, length / original_length) if isinstance(factor, str) else factor


def plain_frequencies(theta: float, dims: int) -> Tensor:
    """(r/2,) float64, θ_k = b^(−2k/r) in radians per token. Su et al. 2021 (arXiv:2104.09864), eq.
    15."""
    return theta ** -(torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)


def resonant(frequencies: Tensor) -> Tensor:
    """Frequencies whose wavelengths are whole numbers of tokens: 2π / round(2π / θ_k).

    Wang et al. 2024 (arXiv:2403.00071): a pair with λ_k ≤ L0 repeats exactly and has no new angles
    beyond L0. Frequencies of 0 are unchanged.
    """
    wavelengths = (2 * math.pi / frequencies).round().clamp(min=1)
    return 2 * math.pi / wavelengths


class Scaling(StrictSettings):
    """Base class of frequency scaling methods."""

    depends_on_length: ClassVar[bool] = False  # whether the frequencies depend on declared lengths
    untouched: ClassVar[int] = 0  # positions below this keep the trained frequencies
    pairs: ClassVar[int | None] = None  # number of rotated pairs that the settings fix; None: any

    name: str

    def stretch(self, length: int, original_length: int) -> float:
        """s for a sequence of `length` tokens."""
        return 1.0

    def frequencies(
        self,
        plain: Tensor,
        stretch: float,
        original_length: int,
    ) -> tuple[Tensor, float]:
        """(R,) float64 frequencies in radians per token, from the trained ones `plain`, and the
        amplitude."""
        return plain, 1.0

    def describe(self, length: int, original_length: int) -> str:
        """The method for a sequence of `length` tokens, e.g. `yarn factor 4 (auto)`."""
        if "factor" not in type(self).model_fields:
            return self.name
        kind = " (auto)" if self.depends_on_length else ""
        return f"{self.name} factor {self.stretch(length, original_length):g}{kind}"


class NoScaling(Scaling):
    """No scaling."""

    name: Literal["none"] = "none"


class DropScaling(Scaling):
    """DroPE, θ_k = 0: no rotation, so the model is NoPE with the same weights.

    Gelberg et al. 2025 (arXiv:2512.12167). At test time it measures how much the model depends on
    positions; the paper's method also continues training at the original length.
    """

    name: Literal["drop"] = "drop"

    def frequencies(self, plain, stretch, original_length):
        return torch.zeros_like(plain), 1.0


class FactorScaling(Scaling):
    """Base class of methods with a stretch factor."""

    factor: Factor = setting("auto", "stretch factor s; auto: max(1, L / original_length)")

    @property
    def depends_on_length(self):
        return self.factor == "auto"

    def stretch(self, length, original_length):
        return stretch_of(self.factor, length, original_length)


class LinearScaling(FactorScaling):
    """Position interpolation, θ_k / s. Chen et al. 2023 (arXiv:2306.15595) eq. 3."""

    name: Literal["linear"] = "linear"

    def frequencies(self, plain, stretch, original_length):
        return plain / stretch, 1.0


def change_base(plain: Tensor, stretch: float) -> Tensor:
    """θ_k·s^(−2k/(r−2)), the frequencies of base b·s^(r/(r−2))."""
    pairs = len(plain)
    if pairs < 2:
        raise ModelError(f"ntk scaling requires at least 4 rotated dimensions, got {2 * pairs}")
    exponents = torch.arange(pairs, dtype=torch.float64, device="cpu") / (pairs - 1)
    return plain * stretch**-exponents


class NTKScaling(FactorScaling):
    """NTK-aware base change, b' = b·s^(r/(r−2)): keeps the highest frequency, divides the lowest by
    s.

    bloc97 2023; stated in Peng et al. 2023 (arXiv:2309.00071), eq. 16.
    """

    name: Literal["ntk"] = "ntk"

    def frequencies(self, plain, stretch, original_length):
        return change_base(plain, stretch), 1.0


class DynamicScaling(Scaling):
    """Dynamic NTK, b' = b·(f·L/L0 − (f − 1))^(r/(r−2)): NTK by sequence length; unchanged up to L0.

    emozilla 2023; `dynamic` in Hugging Face, where L is the current length, so cached keys become
    stale as the text grows. Here L is the declared length, constant within a sequence, so logits
    are the same with and without a cache.
    """

    depends_on_length = True

    name: Literal["dynamic"] = "dynamic"
    factor: float = setting(
        1.0,
        "f; 1 equals `ntk` with factor auto, larger values stretch more",
        gt=0,
    )

    def stretch(self, length, original_length):
        return 1 + self.factor * (max(length, original_length) / original_length - 1)

    def frequencies(self, plain, stretch, original_length):
        return change_base(plain, stretch), 1.0


def blend(plain: Tensor, stretch: float, keep: Tensor) -> Tensor:
    """(R,) weighted mean of the plain frequencies, with weights `keep` (R,), and of the frequencies
    divided by the stretch, with weights 1 − `keep`."""
    return plain * keep + plain / stretch * (1 - keep)


def turns_within(plain: Tensor, length: int) -> Tensor:
    """(R,) number of rotations of each pair within `length` tokens: L0 / λ_k."""
    return length * plain / (2 * math.pi)


def ramp_ends(
    plain: Tensor,
    length: int,
    fast: float,
    slow: float,
) -> tuple[float, float]:
    """Fractional indices of the pairs with `fast` and `slow` rotations within `length` tokens."""
    most = float(turns_within(plain, length)[0])
    ratio = math.log(float(plain[0] / plain[1]))
    return math.log(most / fast) / ratio, math.log(most / slow) / ratio


def ramp_by_index(
    plain: Tensor,
    length: int,
    fast: float,
    slow: float,
    truncate: bool = True,
) -> Tensor:
    """(R,) 1 for pairs with more than `fast` rotations within `length`, 0 below `slow`, linear in k
    between.

    The ramp is between the fractional indices of pairs with these numbers of rotations; `truncate`
    rounds them outwards (jquesnelle/yarn `find_correction_range`, Hugging Face).
    """
    pairs = len(plain)
    if pairs < 2:
        raise ModelError(
            f"a ramp over pairs requires at least 4 rotated dimensions, got {2 * pairs}"
        )
    low, high = ramp_ends(plain, length, fast, slow)
    # The released code clamps an end beyond the last pair, which inverts the ramp.
    if high <= 0:
        return torch.zeros_like(plain)
    if low >= pairs - 1:
        return torch.ones_like(plain)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    index = torch.arange(pairs, dtype=torch.float64, device="cpu")
    return 1 - ((index - low) / (high - low)).clamp(0, 1)


class ByPartsScaling(FactorScaling):
    """NTK-by-parts as first released: keeps high frequencies, uses NTK for middle ones, divides low
    ones.

    bloc97 2023, LlamaPartNTKScaledRotaryEmbedding in jquesnelle/yarn. Two ramps: from divided to
    NTK between 0.75 and 1.25 rotations within L0, and from NTK to kept between 2 and 16 rotations.
    """

    name: Literal["by_parts"] = "by_parts"

    def frequencies(self, plain, stretch, original_length):
        # β and γ of the released code, "found experimentally for LLaMA".
        ntk = ramp_by_index(plain, original_length, 1.25, 0.75)
        keep = ramp_by_index(plain, original_length, 16, 2)
        slow = plain / stretch * (1 - ntk) + change_base(plain, stretch) * ntk
        return slow * (1 - keep) + plain * keep, 1.0


class YaRNScaling(FactorScaling):
    """YaRN: keeps high frequencies, interpolates low ones, with a ramp between, and scales the
    logits.

    Peng et al. 2023 (arXiv:2309.00071). There are two versions of the ramp, which differ widely for
    middle frequencies: `dim` is linear in the pair index, between the pairs with beta_fast and
    beta_slow rotations within L0 (the authors' code and Hugging Face); `wavelength` is linear in
    the number of rotations (the paper, eq. 17-18).

    The temperature is an amplitude a of cos and sin: logits of rotated features get a factor a².
    DeepSeek also multiplies all logits by (0.1·mscale_all_dim·ln s + 1)²; here, as in Hugging Face,
    the mscales only set the amplitude. If all features are rotated, the two factors together are
    equivalent to attention_factor 0.1·mscale·ln s + 1 (the default for mscale 1) without mscales.
    """

    name: Literal["yarn"] = "yarn"
    beta_fast: float = setting(32.0, "pairs with more rotations within L0 are unchanged", gt=0)
    beta_slow: float = setting(
        1.0, "frequencies of pairs with fewer rotations are divided by s", gt=0
    )
    ramp: Literal["dim", "wavelength"] = setting(
        "dim", "ramp linear in the pair index, or in the number of rotations"
    )
    truncate: bool = setting(True, "round the ends of the dim ramp outwards to integers")
    attention_factor: float | None = setting(
        None,
        "amplitude of cos and sin; null: 0.1 ln s + 1",
        gt=0,
    )
    mscale: float | None = setting(
        None,
        "with mscale_all_dim: amplitude (0.1 mscale ln s + 1) / (0.1 mscale_all_dim ln s + 1)",
        gt=0,
    )
    mscale_all_dim: float | None = setting(None, "see mscale", gt=0)

    @model_validator(mode="after")
    def _fields_agree(self):
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must exceed beta_slow {self.beta_slow}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim form one ratio: set both or neither")
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError(
                "attention_factor and mscale both set the amplitude: set only one of them"
            )
        return self

    def frequencies(self, plain, stretch, original_length):
        if self.ramp == "dim":
            keep = ramp_by_index(
                plain,
                original_length,
                self.beta_fast,
                self.beta_slow,
                self.truncate,
            )
        else:
            turns = turns_within(plain, original_length)
            keep = ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        return blend(plain, stretch, keep), self._amplitude(math.log(stretch))

    def _amplitude(self, log_stretch: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return 0.1 * log_stretch + 1
        divisor = 0.1 * self.mscale_all_dim * log_stretch + 1
        return (0.1 * self.mscale * log_stretch + 1) / divisor


class LongRoPEScaling(FactorScaling):
    """LongRoPE: θ_k / λ̂_k with searched divisors, one list up to L0 and one beyond.

    Ding et al. 2024 (arXiv:2402.13753). The declared sequence length selects the list, so
    frequencies are constant within a sequence; Hugging Face switches when the text crosses L0,
    which leaves stale keys. The amplitude √(1 + ln s / ln L0) applies to both lists, as in Hugging
    Face; with factor auto it is 1 up to L0. `first` is the paper's n̂; these positions have
    amplitude 1, as in the authors' code. With `first`, scores are not a function of distance alone.
    """

    @property
    def depends_on_length(self):
        return True

    name: Literal["longrope"] = "longrope"
    factor: Factor = setting(
        "auto",
        "stretch factor s of the amplitude; auto: max(1, L / original_length)",
    )
    short_factor: Divisors | None = setting(
        None,
        "divisor λ̂ of each pair up to original_length; null: all 1",
    )
    long_factor: Divisors = Field(description="divisor λ̂ of each pair beyond original_length")
    first: int = setting(0, "number of first positions with trained frequencies (n̂)", ge=0)
    attention_factor: float | None = setting(
        None,
        "amplitude of cos and sin; null: √(1 + ln s / ln original_length)",
        gt=0,
    )

    @property
    def untouched(self):
        return self.first

    @property
    def pairs(self):
        return len(self.long_factor)

    def stretch(self, length, original_length):
        return max(1.0, length / original_length)

    def frequencies(self, plain, stretch, original_length):
        for key in ("short_factor", "long_factor"):
            divisors = getattr(self, key)
            if divisors is not None and len(divisors) != len(plain):
                raise ModelError(
                    f"longrope's {key} must have {len(plain)} numbers, one per pair of rotated "
                    f"features, got {len(divisors)}"
                )
        divisors = self.long_factor if stretch > 1 else self.short_factor
        scaled = plain
        if divisors is not None:
            scaled = plain / torch.tensor(divisors, dtype=torch.float64, device="cpu")
        if self.attention_factor is not None:
            return scaled, self.attention_factor
        s = stretch if self.factor == "auto" else self.factor
        return scaled, math.sqrt(1 + math.log(s) / math.log(original_length))


class Llama3Scaling(FactorScaling):
    """Llama 3.1: keeps wavelengths below L0/high, divides those above L0/low by s, interpolates
    between.

    Meta's released code; `llama3` in Hugging Face. No temperature.
    """

    name: Literal["llama3"] = "llama3"
    low_freq_factor: float = setting(1.0, "wavelengths above L0 / this are divided by s", gt=0)
    high_freq_factor: float = setting(4.0, "wavelengths below L0 / this are kept", gt=0)

    @model_validator(mode="after")
    def _factors_in_order(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
                f"{self.low_freq_factor}"
            )
        return self

    def frequencies(self, plain, stretch, original_length):
        turns = turns_within(plain, original_length)
        low = self.low_freq_factor
        keep = (turns - low) / (self.high_freq_factor - low)
        return blend(plain, stretch, keep.clamp(0, 1)), 1.0


class ClippedScaling(Scaling):
    """Clipped RoPE: θ_(R−c+i)·(1 + cos(πi/(c − 1)))/2 for the c lowest frequencies, i = 0, ..., c −
    1; the lowest becomes 0, which is no rotation.

    Li et al. 2026, CoPE (arXiv:2602.05258); the released code sets c = 20 of 64 pairs. A smooth end
    of the spectrum avoids the oscillating scores of a hard one. The paper trains with it; at test
    time it also applies to models that were trained without.
    """

    name: Literal["clipped"] = "clipped"
    pairs_clipped: int | None = setting(
        None,
        "c; null: the pairs that complete no turn within original_length",
        ge=2,
    )

    def frequencies(self, plain, stretch, original_length):
        count = self.pairs_clipped
        if count is None:
            count = int((turns_within(plain, original_length) < 1).sum())
        if count > len(plain):
            raise ModelError(
                f"clipped scaling: pairs_clipped = {count} exceeds the {len(plain)} rotated pairs"
            )
        angles = torch.linspace(0, math.pi, count, dtype=torch.float64, device="cpu")
        scaled = plain.clone()
        scaled[len(plain) - count :] *= (1 + angles.cos()) / 2
        return scaled, 1.0


class PowerScaling(Scaling):
    """Giraffe's power basis, θ_k·(1 − k/R)^p: slow pairs are slowed down more than fast ones.

    Pal et al. 2023 (arXiv:2308.10882), in the form of the released code.
    """

    name: Literal["power"] = "power"
    power: float = setting(0.5, "exponent p", gt=0)

    def frequencies(self, plain, stretch, original_length):
        k = torch.arange(len(plain), dtype=torch.float64, device="cpu")
        return plain * (1 - k / len(plain)) ** self.power, 1.0


class TruncatedScaling(Scaling):
    """Giraffe's truncated basis: pairs that complete a turn within L0 tokens are kept, pairs that
    complete less than 1/8 of a turn do not rotate, and pairs between complete 1/16 of a turn.

    Pal et al. 2023 (arXiv:2308.10882); both thresholds and the frequency between are those of the
    released code, because the paper leaves three numbers open. The authors train with it.
    """

    name: Literal["truncated"] = "truncated"
    length: int | None = setting(None, "L0 of the thresholds; null: original_length", ge=1)

    def frequencies(self, plain, stretch, original_length):
        length = self.length or original_length
        turns = turns_within(plain, length)
        slow = torch.where(turns < 1 / 8, 0.0, 2 * math.pi / (16 * length))
        return torch.where(turns < 1, slow, plain), 1.0


AnyScaling = Annotated[
    NoScaling
    | LinearScaling
    | NTKScaling
    | DynamicScaling
    | ByPartsScaling
    | YaRNScaling
    | LongRoPEScaling
    | Llama3Scaling
    | ClippedScaling
    | PowerScaling
    | TruncatedScaling
    | DropScaling,
    Field(discriminator="name"),
]
