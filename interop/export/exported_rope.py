"""Rotations by fixed frequencies as transformers' `rope_parameters`."""

from dataclasses import dataclass
from typing import Any

from interop.huggingface.rope_config import REFERS_TO_LENGTH
from model.position import PositionalScheme
from model.position.remap import NoRemap
from model.position.scaling import plain_frequencies
from model.position.schemes.learned_rope import LearnedRope
from model.position.schemes.rope import PRopeSettings, Rope

# our scaling method -> transformers' rope_type
TYPES = {
    "none": "default",
    **{name: name for name in ("linear", "dynamic", "llama3", "yarn", "longrope")},
}
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
        native: `rope_parameters` with the settings of the scaling method, if transformers has one
            of its name, whose frequencies may be others.
    """

    theta: float
    frequencies: tuple[float, ...]
    amplitude: float
    layout: str
    beyond: tuple[tuple[float, ...], float]
    native: dict[str, Any] | None

    @property
    def rotation(self) -> tuple:
        """What determines the angles at any length."""
        return self.frequencies, self.amplitude, *self.beyond

    def parameters(self, original_length: int, native: bool) -> dict[str, Any]:
        """`rope_parameters`: native ones, or LongRoPE with one list of divisors for all lengths."""
        if native and self.native:
            return {"rope_theta": self.theta, **self.native}
        plain = plain_frequencies(self.theta, 2 * len(self.frequencies)).tolist()
        divisors = [a / b if b else STILL for a, b in zip(plain, self.frequencies, strict=True)]
        return {
            "rope_theta": self.theta,
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
    if not isinstance(settings.remap, NoRemap):
        return f"remap {settings.remap.name} treats pairs differently by distance"
    if settings.imaginary:
        return "imaginary heads share the queries of others"
    if settings.scaling.untouched:
        return "scaling.first keeps the frequencies of the first positions"
    length = scheme.geometry.original_length
    frequencies, amplitude = scheme.frequencies(scheme.stretch(length))
    beyond, beyond_amplitude = scheme.frequencies(scheme.stretch(4 * length))
    return RopeTable(
        theta=settings.theta,
        frequencies=tuple(frequencies.tolist()),
        amplitude=amplitude,
        layout=settings.layout,
        beyond=(tuple(beyond.tolist()), beyond_amplitude),
        native=_native(scheme),
    )


def _native(scheme: Rope) -> dict[str, Any] | None:
    settings = scheme.settings
    scaling = settings.scaling
    rope_type = TYPES.get(scaling.name)
    given = scaling.model_dump(exclude={"name", "ramp", "first"}, exclude_none=True)
    if given.get("factor") == "auto":
        given["factor"] = 1.0
    if rope_type == "longrope":
        given.setdefault("short_factor", [1.0] * (scheme.dims // 2))
    if rope_type in REFERS_TO_LENGTH:
        given["original_max_position_embeddings"] = scheme.geometry.original_length
    if isinstance(settings, PRopeSettings):
        rope_type = "proportional"
        given["partial_rotary_factor"] = settings.share
    return None if rope_type is None else {"rope_type": rope_type, **given}
