"""Logits of an exported folder, loaded by transformers, compared with ours.

transformers computes the angles of rotations in float32, with errors that grow with the position. A
tolerance of logits that covered these errors would hide a wrong frequency. The tables of cos and
sin are therefore compared separately, with a bound on the rounding of each entry, and replaced by
the exact tables. The tolerance of logits is then that of float32 matrix products at every length.
"""

import copy
import inspect
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import InteropError
from interop.extras import load_extra
from model import TokenPositions, Transformer
from model.mixers.recurrent import Recurrent
from model.position.schemes.learned_rope import LearnedRope
from model.position.schemes.rope import Rope

CHUNK = 1024  # tokens per pass of longer inputs; bounds the memory of masks and logits
MULTIPLES = (1, 4, 16)  # multiples of the trained length
# The states of recurrent layers amplify rounding errors, by a factor that varies with the order of
# operations: for a few tokens, the error in transformers is up to 6 times our error.
AMPLIFIED = 16
ROUNDING = 2.0**-24  # largest relative error of one float32 operation
# Rounded operations between b^x and the angle: power, division, scaling, ramp between two
# frequencies, and product with the position. The exponent x = −2k/r is rounded too; the power b^x
# multiplies this error by ln b.
OPERATIONS = 16
OF_TABLE = 8 * ROUNDING  # largest error of the cos or sin of a given angle, times the amplitude


@dataclass(frozen=True)
class Parity:
    """The comparison at one length.

    Attributes:
        length: number of tokens.
        difference: largest absolute difference of a logit.
        tolerance: largest accepted difference.
    """

    length: int
    difference: float
    tolerance: float

    @property
    def is_met(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


def parity_lengths(model: Transformer, multiples: Sequence[int] = MULTIPLES) -> list[int]:
    """The multiples of the trained length, up to the longest input of the scheme."""
    limit = model.limit or sys.maxsize
    return sorted({min(multiple * model.train_length, limit) for multiple in multiples})


def measure(
    model: Transformer, folder: Path, model_type: str | None, lengths: Sequence[int]
) -> Iterator[Parity]:
    """Compare logits of random tokens, in float32 on the CPU.

    Args:
        model: a model in float32, in evaluation mode.
        model_type: None for a generated modeling file.

    Raises:
        InteropError: transformers cannot load the folder, some weights are missing or left over, or
            transformers rotates by other angles.
    """
    theirs = _load(folder, model_type) if lengths else None
    for length in lengths:
        with exact_angles(theirs, model, length):
            comparison = _compared(model, theirs, model_type, length)
        yield comparison


def _load(folder: Path, model_type: str | None) -> Any:
    load = load_extra("transformers").AutoModelForCausalLM.from_pretrained
    theirs, info = load(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=model_type is None,
    )
    if model_type is None:  # transformers has copied the modeling file to the user's cache
        shutil.rmtree(Path(inspect.getfile(type(theirs))).parent)
        del sys.modules[type(theirs).__module__]
    wrong = {key: sorted(names) for key, names in info.items() if names and key != "error_msgs"}
    if wrong:
        raise InteropError(f"transformers does not load all weights of {folder}: {wrong}")
    return theirs.eval()


@torch.no_grad()
def _compared(
    model: Transformer,
    theirs: Any,
    model_type: str | None,
    length: int,
) -> Parity:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, model.vocab_size, (1, length), generator=generator)
    # If frequencies depend on the length, transformers' cache would contain keys with other
    # frequencies.
    size = length if model.depends_on_length and model_type else CHUNK
    cache = model.make_cache(1, length)
    positions = TokenPositions.plain(length)
    past = None if model_type else theirs.new_cache(length)
    precise = precise_cache = None
    if model_type and any(isinstance(block.mixer, Recurrent) for block in model.layers):
        precise = copy.deepcopy(model).double()
        precise_cache = precise.make_cache(1, length)
    difference = largest = rounding = 0.0
    for start in range(0, length, size):
        stop = min(start + size, length)
        part = ids[:, start:stop]
        new = positions.part(start, stop, position_end=stop)
        ours = model(part, new, cache=cache)
        if precise is not None:
            exact = precise(part, new, cache=precise_cache)
            rounding = max(rounding, float((exact - ours).abs().max()))
        output = theirs(part, past_key_values=past, use_cache=True)
        past = output.past_key_values
        difference = max(difference, float((output.logits - ours).abs().max()))
        largest = max(largest, float(ours.abs().max()))
    # The same products in another order differ by up to 1e-5 of the largest absolute logit, or of
    # 1.
    tolerance = max(1e-5 * max(1.0, largest), AMPLIFIED * rounding)
    return Parity(length, difference, tolerance)


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
    """The rotations of a model at a length, one for each scheme that rotates."""
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
        # Interpolated frequencies have the rounding errors of both frequencies that they lie
        # between.
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
    """Within this context, models of transformers rotate by our angles, after their angles were
    compared with ours.

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
        positions = positions[0] if positions.ndim == 3 else positions  # text among images
        tables = _exact_tables(torch.stack(out), positions, exact)
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


def _exact_tables(theirs: Tensor, positions: Tensor, exact: list[Rotation]) -> Tensor:
    """The exact tables of the rotation that equals `theirs` (2, B, T, 2R) up to rounding."""
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
