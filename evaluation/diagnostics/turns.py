"""Rotary pairs without a full rotation in training."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from model import Transformer
from model.position.schemes.rope import Rope


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


def pairs_of(model: Transformer, trained: dict[str, Tensor], length: int) -> Iterator[dict]:
    """Every rotary pair of each kind of layer: its wavelength in tokens (None if it does not
    rotate), its turns in the trained length as trained, from `trained` (pairs,) by kind, and in
    this length."""
    for kind, frequencies in frequencies_of(model, length).items():
        turns = trained.get(kind, torch.zeros(0)).tolist()
        pairs = zip(turns, frequencies.tolist(), strict=False)
        for pair, (turns_trained, frequency) in enumerate(pairs):
            yield {
                "kind": kind,
                "pair": pair,
                "wavelength": 2 * math.pi / frequency if frequency else None,
                "turns_trained": turns_trained,
                "turns": length * frequency / (2 * math.pi),
            }
