"""Recurrent layers and short convolutions: planted faults, state of constant size, configurations.

Layers of transformers, with all their options, are in tests/interop."""

from pathlib import Path

import pytest
import torch
import yaml

from model import SCHEMES, ModelError, ModelSettings, TokenPositions, Transformer
from model.mixers.recurrence import LayerState
from tests.model.zoo import CONFIGS, MIXER_CASES, RECURRENT, D, H, V, build, ids


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
            is_state = isinstance(layer, LayerState)
            stored = layer._stored if is_state else layer._buffers
            numbers += sum(x.numel() for x in stored.values())
        assert numbers == model.cached_numbers(tokens)


# Schemes whose logits depend on features of queries and keys that latent attention does not have.
READ_FEATURES = {"shaw", "transformer_xl", "cope", "path", "hyperbolic", "wall"}


def test_latent_attention_expands_the_keys_where_that_is_cheaper():
    """With rank 7 and 12 expanded features: a pass over a prompt expands the keys once; a single
    query of many keys is multiplied with the latent vectors."""
    mixer = {"name": "latent", "rank": 7, "unrotated_dim": 4}
    layer = build({"name": "none"}, kv_heads=1, mixer=mixer).layers[0].mixer
    assert not layer.is_absorbed(queries=100, keys=100)
    assert not layer.is_absorbed(queries=1, keys=1)
    assert layer.is_absorbed(queries=1, keys=100)


@pytest.mark.parametrize("case", ["gla-none", "kda-none", "mamba2-none"])
def test_flops_of_recurrent_layers_count_the_pairs_of_a_chunk(case):
    """Forward and backward take 6 FLOPs for each feature of q·k and of weights·v. In chunks of 4,
    queries have 1 to 4 keys; a text of 3 tokens has no whole chunk. The state takes 12 FLOPs for
    each of its numbers, and everything twice with the delta rule."""
    model = build(case, layers=1)
    layer = model.layers[0].mixer
    for length, keys in ((12, [1, 2, 3, 4] * 3), (3, [1, 2, 3])):
        pairs = sum(6 * (D + 12) * count for count in keys) / length
        once = H * (pairs + 12 * D * 12)
        assert layer.pair_flops(length) == pytest.approx(once * (2 if case == "kda-none" else 1))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mixer", ["latent-rope", "kda-none", "linear-numerator-rope"])
@torch.no_grad()
def test_every_scheme_works_with_a_mixer_or_is_refused(mixer, scheme):
    keys = {**MIXER_CASES[mixer], "position": {"name": scheme}}
    try:
        model = build(**keys)
    except ModelError:
        return
    assert mixer != "latent-rope" or scheme not in READ_FEATURES
    assert model(ids(1, 9)).isfinite().all()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@torch.no_grad()
def test_configurations_build_and_run(path: Path):
    changes = yaml.safe_load(path.read_text())["model"]
    settings = ModelSettings.model_validate({"dim": 96, "heads": 3, "layers": 2, **changes})
    model = Transformer(settings, V, 16).initialize(0)
    assert model(ids(2, 9)).isfinite().all()
