"""Rotation angles of transformers, compared with ours and replaced by ours.

transformers computes angles in float32, with errors that grow with the position. In a comparison of
logits they would require a tolerance that grows too, which hides a wrong frequency. Here the tables
of cos and sin are compared alone, with a bound on the float32 rounding of each entry, and replaced
by the exact ones: the tolerance of logits is then that of float32 matrix products at every length.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errors import InteropError
from model import Transformer
from model.position.schemes.learned_rope import LearnedRope
from model.position.schemes.rope import Rope

ROUNDING = 2.0**-24  # largest relative error of one float32 operation
# Rounded operations between b^x and the angle: power, division, scaling, ramp between two
# frequencies, and product with the position. The exponent x = −2k/r is rounded too; b^x multiplies
# its error by ln b.
OPERATIONS = 16
OF_TABLE = 8 * ROUNDING  # of cos or sin of a given angle, times the amplitude


@dataclass(frozen=True)
class Rotation:
    """The exact rotation of some layers.

    Attributes:
        frequencies: (R,) float64, radians per token.
        errors: (R,) bound on the error of each frequency in float32.
        amplitude: factor on cos and sin.
    """

    frequencies: Tensor
    errors: Tensor
    amplitude: float

    def tables(self, positions: Tensor) -> Tensor:
        """(2, ..., 2R) float64 cos and sin of positions (...), features in the layout of
        transformers."""
        angles = positions.double()[..., None] * torch.cat([self.frequencies, self.frequencies])
        return torch.stack([angles.cos(), angles.sin()]) * self.amplitude

    def bound(self, positions: Tensor) -> Tensor:
        """(..., 2R) largest difference of cos and sin in float32."""
        errors = positions.double()[..., None] * torch.cat([self.errors, self.errors])
        return abs(self.amplitude) * (errors + OF_TABLE)


def rotations(model: Transformer, length: int) -> list[Rotation]:
    """The rotations of a model for texts of a length, one for each scheme that rotates."""
    exact = []
    for scheme in model.position.values():
        if isinstance(scheme, LearnedRope):
            frequencies = scheme.frequencies().detach().double()
            amplitude = 1.0
        elif isinstance(scheme, Rope):
            frequencies, amplitude = scheme.frequencies(scheme.stretch(length))
        else:
            continue
        if not frequencies.any():  # DroPE: exported without positions
            continue
        plain = scheme.settings.theta ** (
            -torch.arange(len(frequencies)).double() / len(frequencies)
        )
        # Interpolated frequencies have the rounding errors of both that they lie between.
        largest = torch.maximum(plain, frequencies.abs())
        relative = (math.log(scheme.settings.theta) + OPERATIONS) * ROUNDING
        exact.append(Rotation(frequencies, largest * relative, float(amplitude)))
    return exact


@contextmanager
def exact_angles(
    theirs: Any,
    model: Transformer,
    length: int,
) -> Iterator[None]:
    """Within this context, models of transformers rotate by our angles, after theirs have been
    compared.

    Raises:
        InteropError: in a forward pass, if their cos or sin differ by more than float32 rounding.
    """
    exact = rotations(model, length)

    def replaced(
        module: Any,
        args: tuple,
        kwargs: dict,
        out: tuple[Tensor, Tensor],
    ) -> Any:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        positions = positions[0] if positions.ndim == 3 else positions  # of text among images
        tables = _same_as_one(torch.stack(out), positions, exact)
        return tuple(tables.to(out[0].dtype))

    named = [
        module for module in theirs.modules() if type(module).__name__.endswith("RotaryEmbedding")
    ]
    hooks = [module.register_forward_hook(replaced, with_kwargs=True) for module in named if exact]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _same_as_one(theirs: Tensor, positions: Tensor, exact: list[Rotation]) -> Tensor:
    """The tables of the rotation that `theirs` (2, B, T, 2R) is, up to rounding."""
    for rotation in exact:
        if theirs.shape[-1] == 2 * len(rotation.frequencies):
            tables = rotation.tables(positions)
            if ((theirs.double() - tables).abs() <= rotation.bound(positions)).all():
                return tables
    raise InteropError(
        f"transformers rotates {theirs.shape[-1]} features by other angles or amplitudes than any "
        "layer of the model, by more than float32 rounding; report this with the run's "
        "settings.yaml"
    )
