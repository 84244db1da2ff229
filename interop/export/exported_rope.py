"""Rotations by fixed frequencies as transformers' `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from interop.huggingface.rope_config import FACTOR_KINDS, is_reversed
from model.position import PositionalScheme
from model.position.remap import NoRemap
from model.position.scaling import (
    DynamicScaling,
    LinearScaling,
    LongRoPEScaling,
    NoScaling,
    YaRNScaling,
    plain_frequencies,
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
    native: Mapping[str, Any] | None

    @property
    def rotation(self) -> tuple:
        """What determines the angles at any length."""
        return self.frequencies, self.amplitude, *self.beyond

    def parameters(self, original_length: int, native: bool = True) -> dict[str, Any]:
        """`rope_parameters`; what has no kind in transformers, or with `native` false every kind
        but LongRoPE and the default, is LongRoPE with one list of divisors for all lengths."""
        base: dict[str, Any] = {"rope_theta": self.theta}
        if self.native and (native or self.native["rope_type"] in ("default", "longrope")):
            return base | dict(self.native)
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


def rope_table(scheme: PositionalScheme) -> RopeTable | str:
    """The rotation of a scheme with fixed frequencies, or the reason why it is none."""
    if isinstance(scheme, LearnedRope):
        learned = tuple(scheme.frequencies().detach().double().tolist())
        s = scheme.settings
        return RopeTable(s.theta, learned, 1.0, s.layout, (learned, 1.0), None)
    assert isinstance(scheme, Rope)
    settings = scheme.settings
    scaling = settings.scaling
    if not isinstance(settings.remap, NoRemap):
        return f"remap {settings.remap.name} treats pairs differently by distance"
    if scaling.untouched:
        return "scaling.first keeps the frequencies of the first positions"
    native = None if settings.resonance else _native(scheme)
    if scaling.depends_on_length and native is None:
        return f"scaling {scaling.name} depends on the declared length"
    length = scheme.geometry.original_length
    frequencies, amplitude = scheme.frequencies(scheme.stretch(length))
    beyond, beyond_amplitude = scheme.frequencies(scheme.stretch(4 * length))
    return RopeTable(
        theta=settings.theta,
        frequencies=tuple(frequencies.tolist()),
        amplitude=amplitude,
        layout=settings.layout,
        beyond=(tuple(beyond.tolist()), beyond_amplitude),
        native=native,
    )


def _native(scheme: Rope) -> dict[str, Any] | None:
    """transformers' parameters of the frequencies, or None if it has no such kind."""
    settings = scheme.settings
    scaling = settings.scaling
    length = scheme.geometry.original_length
    original = {"original_max_position_embeddings": length}
    if isinstance(settings, PRopeSettings):
        is_plain = settings.fraction == 1 and not settings.reversed
        if not is_plain or settings.max_wavelength is not None:
            return None
        if not isinstance(scaling, NoScaling | LinearScaling) or scaling.depends_on_length:
            return None
        factor = {} if isinstance(scaling, NoScaling) else {"factor": scheme.stretch(length)}
        return {"rope_type": "proportional", "partial_rotary_factor": settings.share, **factor}
    if not isinstance(settings, RopeSettings):
        return None
    if isinstance(scaling, NoScaling):
        return {"rope_type": "default"}
    if isinstance(scaling, LongRoPEScaling):
        return _longrope(scaling, scheme, original)
    is_dynamic = isinstance(scaling, DynamicScaling)
    if scaling.depends_on_length and not is_dynamic:
        return None
    stretch = scheme.stretch(length)
    if is_dynamic and length != scheme.geometry.train_length:  # which its L0 is
        return None
    if scaling.name in FACTOR_KINDS:
        numbers = {key: getattr(scaling, key) for key in FACTOR_KINDS[scaling.name]}
        numbers |= {} if is_dynamic else {"factor": stretch}
        return {"rope_type": scaling.name, **numbers, **(original if len(numbers) > 1 else {})}
    if not isinstance(scaling, YaRNScaling) or scaling.ramp != "dim":
        return None
    if is_reversed(scheme.spectrum(), length, scaling.beta_fast, scaling.beta_slow):
        return None
    is_given = scaling.attention_factor or scaling.mscale
    return {
        "rope_type": "yarn",
        "factor": stretch,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
        **_amplitude(is_given, scheme.frequencies(stretch)[1]),
        **original,
    }


def _longrope(
    scaling: LongRoPEScaling, scheme: Rope, original: Mapping[str, Any]
) -> dict[str, Any] | None:
    short, long = (scheme.frequencies(s)[1] for s in (1.0, 2.0))
    if short != long:  # an amplitude that follows the length
        return None
    is_auto = scaling.factor == "auto"
    return {
        "rope_type": "longrope",
        "factor": 1.0 if is_auto else float(scaling.factor),
        "short_factor": scaling.short_factor or [1.0] * (scheme.dims // 2),
        "long_factor": scaling.long_factor,
        **_amplitude(scaling.attention_factor or is_auto, short),
        **original,
    }


def _amplitude(is_given: object, amplitude: float) -> dict[str, float]:
    """`attention_factor`, unless the amplitude is the default, which transformers computes as we
    do."""
    return {"attention_factor": float(amplitude)} if is_given else {}
