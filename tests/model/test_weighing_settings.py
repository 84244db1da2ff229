"""Settings of the schemes that compute attention weights: layers, invalid input, test-time overrides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from model import SCHEMES, ModelError, ModelSettings, TokenPositions, Transformer, check_override
from tests.model.zoo import LAYERS, V, build, ids, settings_of


@pytest.mark.parametrize("name", ["cope", "shaw", "transformer_xl", "dape"])
def test_parameters_are_shared_or_per_layer(name):
    assert len(build({"name": name}).position) == LAYERS
    assert len(build({"name": name, "shared": True}).position) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "cope", "positions": 1},
        {"name": "cope", "gate": "halved"},
        {"name": "cope", "shared": "some"},
        {"name": "shaw", "clip": -1},
        {"name": "shaw", "values": "twice"},
        {"name": "shaw", "theta": 3.0},
        {"name": "transformer_xl", "shared": 2},
        {"name": "dape", "base": "t5"},
        {"name": "dape", "width": 0},
        {"name": "stick_breaking", "remainder": "first"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(keys):
    with pytest.raises(ValidationError) as caught:
        ModelSettings(position=keys)
    assert list(keys)[1] in str(caught.value)


@pytest.mark.parametrize("sink", ["learned", "zero"])
def test_stick_breaking_does_not_support_sink_logits(sink):
    settings = settings_of({"name": "stick_breaking", "sink_logit": sink})
    with pytest.raises(ModelError, match=f"sink_logit '{sink}'.*remainder"):
        Transformer(settings, V, 16)


@pytest.mark.parametrize("name", ["shaw", "transformer_xl"])
def test_distance_vectors_reject_real_positions(name):
    model = build(name)
    plain = TokenPositions.plain(6)
    halves = replace(plain, position=plain.position / 2, unit_steps=False)
    assert not SCHEMES[name][1].supports_fractions
    with pytest.raises(ModelError, match=f"'{name}'.*integer positions"):
        model(ids(1, 6), halves)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("cope", "positions", 128),
        ("cope", "gate", "unscaled"),
        ("shaw", "clip", 32),
        ("dape", "base", "alibi"),
        ("stick_breaking", "remainder", "drop"),
    ],
)
def test_only_common_settings_can_be_overridden(name, key, value):
    trained = settings_of({"name": name})
    check_override(trained, settings_of({"name": name, "window": 4, "sinks": 1}))
    with pytest.raises(ModelError, match=f"model.position.{key} cannot be changed.*sinks.*window"):
        check_override(trained, settings_of({"name": name, key: value}))
