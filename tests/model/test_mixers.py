"""Recurrent layers and short convolutions: planted faults, state of constant size, configurations.

Layers of transformers, with all their options, are in tests/interop."""

from pathlib import Path

import pytest
import torch
import yaml

from model import SCHEMES, ModelError, ModelSettings, TokenPositions, Transformer
from model.mixers import layer_state
from tests.model.zoo import CONFIGS, MIXER_CASES, RECURRENT, V, build, ids


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
            is_state = isinstance(layer, layer_state.LayerState)
            stored = layer._stored if is_state else layer._buffers
            numbers += sum(x.numel() for x in stored.values())
        assert numbers == model.cached_numbers(tokens)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mixer", ["latent-rope", "kda-none", "linear-numerator-rope"])
@torch.no_grad()
def test_every_scheme_works_with_a_mixer_or_is_refused(mixer, scheme):
    keys = {**MIXER_CASES[mixer], "position": {"name": scheme}}
    try:
        model = build(**keys)
    except ModelError:
        return
    assert model(ids(1, 9)).isfinite().all()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@torch.no_grad()
def test_configurations_build_and_run(path: Path):
    changes = yaml.safe_load(path.read_text())["model"]
    settings = ModelSettings.model_validate({"dim": 96, "heads": 3, "layers": 2, **changes})
    model = Transformer(settings, V, 16).initialize(0)
    assert model(ids(2, 9)).isfinite().all()
