"""Logits of an exported folder, loaded by transformers, compared with ours."""

import copy
import inspect
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import InteropError
from interop.export.angles import exact_angles
from interop.extras import load_extra
from model import TokenPositions, Transformer
from model.mixers.recurrent import Recurrent

CHUNK = 1024  # tokens per pass beyond it, which bounds the memory of masks and logits
MULTIPLES = (1, 4, 16)  # of the trained length
# The states of recurrent layers amplify rounding errors, by a factor that varies with the order of
# operations: the error of a few tokens in transformers is up to 6 times that of ours.
AMPLIFIED = 16


@dataclass(frozen=True)
class Parity:
    """The comparison at one length.

    Attributes:
        length: tokens.
        difference: largest absolute difference of a logit.
        tolerance: the largest that is accepted.
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


def tolerance(largest: float, rounding: float = 0.0) -> float:
    """The largest accepted difference of logits in float32: that of the same products in another
    order, 1e-5 of the largest absolute logit (or of 1). Angles are compared separately, see
    `exact_angles`.

    Args:
        rounding: the error of our own float32 logits, where it may be larger.
    """
    return max(1e-5 * max(1.0, largest), AMPLIFIED * rounding)


def measure(
    model: Transformer, folder: Path, model_type: str | None, lengths: Sequence[int]
) -> Iterator[Parity]:
    """Compare logits of random tokens, in float32 on the CPU.

    Args:
        model: in float32, in evaluation mode.
        model_type: None for a generated modeling file.

    Raises:
        InteropError: transformers cannot load the folder, some weights are missing or left over, or
            it rotates by other angles.
    """
    theirs = _load(folder, model_type)
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
    # Frequencies that follow the length would leave keys of other frequencies in transformers'
    # cache.
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
            rounding = max(rounding, _largest(precise(part, new, cache=precise_cache) - ours))
        output = theirs(part, past_key_values=past, use_cache=True)
        past = output.past_key_values
        difference = max(difference, _largest(output.logits - ours))
        largest = max(largest, _largest(ours))
    return Parity(length, difference, tolerance(largest, rounding))


def _largest(x: Tensor) -> float:
    return float(x.abs().max())
