"""Rotations by fixed frequencies as transformers' `rope_parameters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.position import PositionalScheme
from model.position.remap import NoRemap
from model.position.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NoScaling,
    Scaling,
    YaRNScaling,
    plain_frequencies,
    ramp_ends,
)
from model.position.schemes.learned_rope import LearnedRope
from model.position.schemes.p_rope import PRopeSettings
from model.position.schemes.rope import Rope, RopeSettings

# divisor of the frequency of a pair that is not rotated: sin(n·θ) is below 1e-23 for any n
STILL = 1e30


@dataclass(frozen=True)
class RopeTable:
    """The rotation of a layer.

    Attributes:
        theta: base b.
        frequencies: of each pair, in radians per token.
        amplitude: factor on cos and sin.
        layout: `half` or `interleaved`.
        beyond: frequencies and amplitude at four times the original length.
        native: `rope_parameters` of the same rotation, without the base, where transformers has its
            kind.
    """

    theta: float
    frequencies: tuple[float, ...]
    amplitude: float
    layout: str
    beyond: tuple[tuple[float, ...], float]
    native: tuple[tuple[str, Any], ...] | None

    @property
    def rotation(self) -> tuple:
        """What determines the angles at any length."""
        return self.frequencies, self.amplitude, *self.beyond

    def parameters(
        self,
        original_length: int,
        native: bool = True,
    ) -> dict[str, Any]:
        """`rope_parameters`; what has no kind in transformers, or with `native` false every kind
        but LongRoPE and the default, is LongRoPE with one list of divisors for all lengths."""
        base: dict[str, Any] = {"rope_theta": self.theta}
        known = dict(self.native or ())
        if known and (native or known["rope_type"] in ("default", "longrope")):
            return base | known
        plain = plain_frequencies(self.theta, 2 * len(self.frequencies)).tolist()
        divisors = [a / b if b else STILL for a, b in zip(plain, self.frequencies, strict=True)]
        return base | {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": float(self.amplitude),
            "original_max_position_embeddings": original_length,
        }


def _default() -> tuple[tuple[str, Any], ...]:
    return (("rope_type", "default"),)


def rope_table(scheme: PositionalScheme) -> RopeTable | str:
    """The rotation of a scheme with fixed frequencies, or the reason why it is none."""
    if isinstance(scheme, LearnedRope):
        frequencies = tuple(scheme.frequencies().detach().double().tolist())
        return RopeTable(
            scheme.settings.theta,
            frequencies,
            1.0,
            scheme.settings.layout,
            (frequencies, 1.0),
            None,
        )
    assert isinstance(scheme, Rope)
    settings = scheme.settings
    geometry = scheme.geometry
    scaling = settings.scaling
    if not isinstance(settings.remap, NoRemap):
        return f"remap {settings.remap.name} treats pairs differently by distance"
    if scaling.untouched:
        return "scaling.first keeps the frequencies of the first positions"
    native = _native(scaling, scheme)
    if settings.resonance:
        native = None
    if scaling.depends_on_length and native is None:
        return f"scaling {scaling.name} depends on the declared length"
    frequencies, amplitude = scheme.frequencies(scheme.stretch(geometry.original_length))
    beyond, beyond_amplitude = scheme.frequencies(scheme.stretch(4 * geometry.original_length))
    return RopeTable(
        settings.theta,
        tuple(frequencies.tolist()),
        amplitude,
        settings.layout,
        (tuple(beyond.tolist()), beyond_amplitude),
        native,
    )


def _native(scaling: Scaling, scheme: Rope) -> tuple[tuple[str, Any], ...] | None:
    """transformers' parameters of a scaling method, or None if it has no such kind."""
    length = scheme.geometry.original_length
    train_length = scheme.geometry.train_length
    settings = scheme.settings
    if isinstance(settings, PRopeSettings):
        is_plain = settings.fraction == 1 and not settings.reversed
        if not is_plain or settings.max_wavelength is not None:
            return None
        share = {"partial_rotary_factor": settings.share}
        if isinstance(scaling, NoScaling):
            return _items("proportional", **share)
        if isinstance(scaling, LinearScaling):
            return _items("proportional", factor=scheme.stretch(length), **share)
        return None
    if not isinstance(settings, RopeSettings):
        return None
    if isinstance(scaling, NoScaling):
        return _default()
    if isinstance(scaling, DynamicScaling):
        # L0 is max_position_embeddings.
        return _items("dynamic", factor=scaling.factor) if length == train_length else None
    if isinstance(scaling, LongRoPEScaling):
        return _longrope(scaling, scheme)
    if scaling.depends_on_length:
        return None
    stretch = scheme.stretch(length)
    if isinstance(scaling, LinearScaling):
        return _items("linear", factor=stretch)
    original = {"original_max_position_embeddings": length}
    if isinstance(scaling, Llama3Scaling):
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        return _items(
            "llama3", factor=stretch, low_freq_factor=low, high_freq_factor=high, **original
        )
    if isinstance(scaling, YaRNScaling) and scaling.ramp == "dim":
        low, high = ramp_ends(
            scheme.spectrum(),
            length,
            scaling.beta_fast,
            scaling.beta_slow,
        )
        if high <= 0 or low > scheme.dims - 1:  # transformers reverses the ramp
            return None
        return _items(
            "yarn",
            factor=stretch,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            truncate=scaling.truncate,
            **_amplitude(
                scaling.attention_factor or scaling.mscale, scheme.frequencies(stretch)[1]
            ),
            **original,
        )
    return None


def _longrope(scaling: LongRoPEScaling, scheme: Rope) -> tuple[tuple[str, Any], ...] | None:
    length = scheme.geometry.original_length
    short, long = (scheme.frequencies(s)[1] for s in (1.0, 2.0))
    if short != long:  # an amplitude that follows the length
        return None
    return _items(
        "longrope",
        factor=1.0 if scaling.factor == "auto" else float(scaling.factor),
        short_factor=scaling.short_factor or [1.0] * (scheme.dims // 2),
        long_factor=scaling.long_factor,
        **_amplitude(scaling.attention_factor or scaling.factor == "auto", short),
        original_max_position_embeddings=length,
    )


def _amplitude(is_given: object, amplitude: float) -> dict[str, float]:
    """`attention_factor`, unless the amplitude is the default, which transformers computes as we
    do."""
    return {"attention_factor": float(amplitude)} if is_given else {}


def _items(rope_type: str, **parameters: Any) -> tuple[tuple[str, Any], ...]:
    return (("rope_type", rope_type), *parameters.items())
