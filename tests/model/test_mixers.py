"""Recurrent layers and short convolutions: planted faults, state of constant size, configurations.

Layers of transformers, with all their options, are in tests/interop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from model import ModelSettings, TokenPositions, Transformer
from model.mixers import layer_state
from model.mixers.recurrence import Inputs
from model.mixers.short_convolution import CausalConvolution
from tests.model import test_conformance, test_recurrence
from tests.model.zoo import CONFIGS, RECURRENT, V, build, ids


def without_documents(inputs: Inputs, before: Tensor | None) -> Inputs:
    """A state that is not reset where a document begins."""
    whole = ORIGINAL(inputs, before)
    return replace(whole, document=None if whole.document is None else whole.document * 0)


def decaying_padding(inputs: Inputs, before: Tensor | None) -> Inputs:
    """Padding that decays the state."""
    log_decay = ORIGINAL(replace(inputs, document=None), None).log_decay
    return replace(ORIGINAL(inputs, before), log_decay=log_decay)


ORIGINAL = Inputs.without_padding
FILTER = CausalConvolution.forward
FAULTS = {
    "state": (Inputs, "without_padding", without_documents, "gated_deltanet-none"),
    "padding": (Inputs, "without_padding", decaying_padding, "mamba2"),
    "convolution": (
        CausalConvolution,
        "forward",
        lambda self, x, order: FILTER(self, x, None),
        "short_convolution-none",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    owner, name, wrong, case = FAULTS[fault]
    check = test_conformance.test_packed_documents_do_not_attend_to_each_other
    if fault == "padding":
        check = test_recurrence.test_padding_and_other_documents_have_no_effect
    check(case)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        check(case)


@pytest.mark.parametrize("case", [*(f"{name}-rope" for name in RECURRENT), "latent-rope"])
@torch.no_grad()
def test_estimates_of_cached_numbers_are_exact(case):
    """States do not grow with the tokens; keys do."""
    model = build(case)
    for tokens in (6, 11):
        cache = model.make_cache(1, tokens)
        model(ids(1, tokens), TokenPositions.plain(tokens), cache=cache)
        numbers = 0
        for layer in cache.layers:
            if isinstance(layer, layer_state.LayerState):
                numbers += sum(x.numel() for x in layer._stored.values())
            else:
                numbers += sum(x.numel() for x in layer._buffers.values())
        assert numbers == model.cached_numbers(tokens)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@torch.no_grad()
def test_configurations_build_and_run(path: Path):
    changes = yaml.safe_load(path.read_text())["model"]
    settings = ModelSettings.model_validate({"dim": 96, "heads": 3, "layers": 2, **changes})
    model = Transformer(settings, V, 16).initialize(0)
    assert model(ids(2, 9)).isfinite().all()
