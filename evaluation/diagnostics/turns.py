"""Rotary pairs without a full rotation in training."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model import Transformer
from model.position.schemes.rope import Rope


@dataclass(frozen=True)
class RotaryPair:
    """One rotary pair of one kind of layer under one method.

    `wavelength`: tokens at the evaluated length; None for a pair that does not rotate.
    `turns_trained`: in the trained length as trained. `turns`: in the evaluated length under the
    method.
    """

    kind: str
    pair: int
    wavelength: float | None
    turns_trained: float
    turns: float


def frequencies_of(model: Transformer, length: int) -> dict[str, Tensor]:
    """(pairs,) radians per token in a sequence of `length` tokens, for every kind of layer that
    rotates pairs at fixed frequencies."""
    kinds = model.settings.layer_kinds
    out = {}
    for kind in dict.fromkeys(kinds):
        layer = f"-{kinds.index(kind)}" if model.kinds[kind].position.per_layer else ""
        scheme = model.position[kind + layer]
        if isinstance(scheme, Rope):
            out[kind] = scheme.frequencies(scheme.stretch(length))[0]
    return out


def pairs_of(model: Transformer, trained: dict[str, Tensor], length: int) -> list[RotaryPair]:
    """Every rotary pair; `trained`: turns within the trained length as trained, by kind of layer
    (pairs,)."""
    return [
        RotaryPair(
            kind,
            pair,
            wavelength=2 * math.pi / frequency if frequency else None,
            turns_trained=turns,
            turns=length * frequency / (2 * math.pi),
        )
        for kind, frequencies in frequencies_of(model, length).items()
        for pair, (turns, frequency) in enumerate(
            zip(trained.get(kind, torch.zeros(0)).tolist(), frequencies.tolist(), strict=False)
        )
    ]
