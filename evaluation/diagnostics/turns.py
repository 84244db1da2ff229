"""Rotary pairs without a full rotation in training, and rounding errors of tables and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.diagnostics.attention_weights import last_outputs
from model import TokenPositions, Transformer
from model.position import PositionalScheme
from model.position.scaling import turns_within
from model.position.schemes.rope import Rope


def scheme_of_layer(model: Transformer, layer: int) -> PositionalScheme:
    """The scheme's instance that serves a layer."""
    kind = model.settings.layer_kinds[layer]
    name = f"{kind}-{layer}" if model.kinds[kind].position.per_layer else kind
    scheme = model.position[name]
    assert isinstance(scheme, PositionalScheme)
    return scheme


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


def frequencies_of(model: Transformer, layer: int, length: int) -> Tensor | None:
    """(pairs,) radians per token in a sequence of `length` tokens; None for a layer that rotates no
    pairs at fixed frequencies."""
    scheme = scheme_of_layer(model, layer)
    if not isinstance(scheme, Rope):
        return None
    return scheme.frequencies(scheme.stretch(length))[0]


def trained_turns(trained: Transformer) -> dict[str, Tensor]:
    """Turns of every rotary pair within the trained length, as trained: {kind of layer:
    (pairs,)}."""
    turns = {}
    for layer, kind in enumerate(trained.settings.layer_kinds):
        frequencies = frequencies_of(trained, layer, trained.train_length)
        if frequencies is not None:
            turns.setdefault(kind, turns_within(frequencies, trained.train_length))
    return turns


def pairs_of(model: Transformer, turns: dict[str, Tensor], length: int) -> list[RotaryPair]:
    """Every rotary pair with fixed frequencies, for every kind of layer; `turns`: as trained."""
    pairs = []
    kinds = model.settings.layer_kinds
    for kind in dict.fromkeys(kinds):
        frequencies = frequencies_of(model, kinds.index(kind), length)
        if kind not in turns or frequencies is None:
            continue
        both = zip(turns[kind].tolist(), frequencies.tolist(), strict=True)
        for n, (trained, frequency) in enumerate(both):
            wavelength = 2 * math.pi / frequency if frequency else None
            now = length * frequency / (2 * math.pi)
            pairs.append(RotaryPair(kind, n, wavelength, trained, now))
    return pairs


def table_drift(model: Transformer, length: int) -> dict[str, float]:
    """Largest difference of table entries from float64 over a window of `length` tokens; empty
    for a model without tables.

    ``as used``: the float32 tables of this model, computed in float64 and rounded. For rotary
    tables also the error of cos and sin ``stored in bfloat16``, or of angles position·θ ``computed
    in float32`` or ``in bfloat16``.
    """
    drift: dict[str, float] = {}

    def add(name: str, exact: Tensor, rounded: Tensor) -> None:
        drift[name] = max(drift.get(name, 0.0), float((exact - rounded.double()).abs().max()))

    positions = TokenPositions.plain(length)
    for layer in range(model.settings.layers):
        scheme = scheme_of_layer(model, layer)
        tables = scheme.tables(positions, torch.float64), scheme.tables(positions, torch.float32)
        for wide, used in zip(*tables, strict=True):
            if wide.dtype == torch.float64:
                add("as used", wide, used)
        if not isinstance(scheme, Rope):
            continue
        frequencies, amplitude = scheme.frequencies(scheme.stretch(length))
        position = torch.arange(length, dtype=torch.float64)[:, None]
        for turn in (torch.cos, torch.sin):
            exact = turn(position * frequencies) * amplitude
            add("stored in bfloat16", exact, exact.bfloat16())
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
                angles = position.to(dtype) * frequencies.to(dtype)
                add(f"computed in {name}", exact, turn(angles) * amplitude)
    return drift


def scored_outputs(
    model: Transformer, tokens: Tensor, keep: int, *, length: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Logits (B, keep, V) and NLL (B, keep) in nats of the last `keep` of tokens (B, L + 1), both
    float64."""
    logits = last_outputs(model, tokens[:, :-1], keep, length=length, chunk=chunk).double()
    targets = tokens[:, -keep:]
    return logits, F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def output_drift(exact: tuple[Tensor, Tensor], rounded: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Differences of the logits and NLL of a lower-precision model from those in float64."""
    logits = rounded[0] - exact[0]
    nll = rounded[1] - exact[1]
    return {
        "logit_max": float(logits.abs().max()),
        "logit_mean": float(logits.abs().mean()),
        "nll_max": float(nll.abs().max()),
        "nll_mean": float(nll.mean()),
    }
