"""Settings of the model: what is refused, what may change after training, whose parameters are shared."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from model import SCHEMES, ModelError, ModelSettings, Transformer, check_override
from model.position import PositionSettings
from tests.model.zoo import H, V, build, refusal, settings_of

ROTARY = {"theta", "scaling", "resonance", "remap"}
# What may change after training, besides window, sinks and temperature.
TEST_TIME = {
    "sinusoidal": {"theta", "offset", "stretch"},
    "learned": {"extend"},
    "rope": ROTARY,
    "p_rope": ROTARY - {"theta"},
    "he_xu": ROTARY,
    "xpos": {"theta"},
    "alibi": {"stretch", "slopes"},
    "t5": {"max_distance"},
    "kerple": {"stretch"},
    "sandwich": {"stretch"},
    "fire": {"threshold"},
    "fox": {"theta"},
    "pope": {"theta"},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_settings_that_may_change_after_training(name):
    trained = settings_of({"name": name})
    extra = trained.position.test_time - PositionSettings.test_time
    assert extra == TEST_TIME.get(name, set())
    for key in set(type(trained.position).model_fields) - {"temperature"}:
        position = trained.position.model_copy(update={key: "other"})
        asked = trained.model_copy(update={"position": position})
        if key in trained.position.test_time:
            check_override(trained, asked)
        else:
            assert f"model.position.{key}" in refusal(lambda a=asked: check_override(trained, a))


@pytest.mark.parametrize("key", sorted(set(ModelSettings.model_fields) - {"position"}))
def test_sizes_may_not_change_after_training(key):
    trained = settings_of({"name": "rope"})
    asked = trained.model_copy(update={key: "other"})
    assert f"model.{key}" in refusal(lambda: check_override(trained, asked))


@pytest.mark.parametrize("name", ["ssmax", "head"])
def test_learned_temperatures_are_neither_added_nor_removed(name):
    learned = settings_of({"name": "rope", "temperature": {"name": name}})
    fixed = settings_of({"name": "rope", "temperature": {"name": "log_n"}})
    for trained, asked in ((learned, fixed), (fixed, learned)):
        message = refusal(lambda t=trained, a=asked: check_override(t, a))
        assert "model.position.temperature" in message


@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_are_shared_or_per_layer(name):
    fields = SCHEMES[name][0].model_fields
    for choice in ({}, {"shared": True}, {"shared": False}, {"share": "layer"}):
        if set(choice) <= set(fields) and name != "p_rope":
            model = build({"name": name, **choice}, layers=2)
            count = 2 if model.settings.position.per_layer else 1
            assert len(model.position) == count


LONGROPE = {"name": "longrope", "long_factor": [1.0] * 5}
# Settings of a scheme, and the key that the error names.
INVALID = [
    ({"name": "rope", "window": 0}, "window"),
    ({"name": "rope", "sinks": 2}, "sinks"),
    ({"name": "rope", "windw": 3}, "windw"),
    ({"name": "rope", "theta": 1.0}, "theta"),
    ({"name": "rope", "fraction": 0.1}, "fraction"),
    ({"name": "rope", "fraction": 1.2}, "fraction"),
    ({"name": "rope", "temperature": {"name": "fixed", "value": [1.0] * (H + 1)}}, "temperature"),
    ({"name": "rope", "temperature": {"name": "log_n", "length": 1}}, "length"),
    ({"name": "rope", "temperature": {"name": "fixed", "value": 0}}, "value"),
    ({"name": "rope", "scaling": {"name": "linear", "factor": 0.5}}, "factor"),
    ({"name": "rope", "scaling": {"name": "yarn", "beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
    ({"name": "rope", "scaling": {"name": "yarn", "mscale": 1.0}}, "mscale"),
    (
        {
            "name": "rope",
            "scaling": {"name": "yarn", "mscale": 1, "mscale_all_dim": 1, "attention_factor": 1},
        },
        "attention_factor",
    ),
    ({"name": "rope", "scaling": {"name": "llama3", "high_freq_factor": 0.5}}, "high_freq_factor"),
    ({"name": "rope", "scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor"),
    ({"name": "rope", "scaling": {**LONGROPE, "short_factor": [1.0]}}, "short_factor"),
    (
        {"name": "rope", "scaling": {**LONGROPE, "first": 2}, "remap": {"name": "rerope"}},
        "scaling.first",
    ),
    ({"name": "rope", "fraction": 0.2, "scaling": {"name": "yarn"}}, "rotated dimensions"),
    ({"name": "rope", "fraction": 0.2, "scaling": {"name": "ntk", "factor": 2}}, "ntk"),
    ({"name": "rope", "remap": {"name": "rerope", "distance": 0}}, "distance"),
    ({"name": "rope", "remap": {"name": "leaky_rerope", "factor": 0.5}}, "factor"),
    (
        {"name": "rope", "remap": {"name": "leaky_rerope", "distance": 99, "factor": "auto"}},
        "remap.factor",
    ),
    ({"name": "rope", "remap": {"name": "self_extend", "neighbors": 5, "group": 2}}, "neighbors"),
    ({"name": "rope", "remap": {"name": "self_extend", "group": 99}}, "remap.group"),
    ({"name": "rope", "remap": {"name": "dual_chunk", "chunk": 3, "local": 3}}, "remap.local"),
    ({"name": "rope", "remap": {"name": "dual_chunk", "chunk": 1}}, "chunk"),
    ({"name": "rope", "remap": {"name": "lambda"}}, "window and sinks"),
    ({"name": "rope", "window": 4, "remap": {"name": "streaming"}}, "window and sinks"),
    ({"name": "p_rope", "share": 0.1}, "share"),
    ({"name": "p_rope", "share": 1.1}, "share"),
    ({"name": "fope", "max_length": 2}, "max_length"),
    ({"name": "fope", "gain": -1}, "gain"),
    ({"name": "xpos", "gamma": 0}, "gamma"),
    ({"name": "hyperbolic", "margin": 0}, "margin"),
    ({"name": "binary", "max_length": 1 << 40}, "max_length"),
    ({"name": "integer", "scale": 0}, "scale"),
    ({"name": "sine", "base": 1}, "base"),
    ({"name": "sinusoidal", "offset": -1}, "offset"),
    ({"name": "learned", "extend": "wrap"}, "extend"),
    ({"name": "alibi", "slopes": [0.1]}, "slopes"),
    ({"name": "alibi", "slopes": [0.1] * H, "learned": True}, "slopes"),
    ({"name": "t5", "max_distance": 16}, "max_distance"),
    ({"name": "kerple", "form": "exp"}, "form"),
    ({"name": "sandwich", "dims": 3}, "dims"),
    ({"name": "fire", "threshold": 0}, "threshold"),
    ({"name": "cope", "positions": 1}, "positions"),
    ({"name": "shaw", "clip": -1}, "clip"),
    ({"name": "dape", "base": "t5"}, "base"),
    ({"name": "stick_breaking", "sink_logit": "zero"}, "sink_logit"),
    ({"name": "path", "window": 5, "sinks": 1}, "sinks"),
    ({"name": "fox", "window": 1, "sinks": 1}, "window of 2"),
    ({"name": "selective_rope", "width": 1}, "width"),
]


@pytest.mark.parametrize(("position", "key"), INVALID, ids=str)
def test_invalid_settings_name_their_key(position, key):
    with pytest.raises((ValidationError, ModelError)) as caught:
        Transformer(settings_of(position), V, 11)
    message = str(caught.value)
    if isinstance(caught.value, ValidationError):
        message = " ".join(f"{e['loc']} {e['msg']}" for e in caught.value.errors())
    assert key in message


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"dim": 30, "heads": 4}, "dim"),
        ({"heads": 6, "kv_heads": 4, "head_dim": 4}, "kv_heads"),
        ({"layers": 0}, "layers"),
        ({"norm_eps": 0}, "norm_eps"),
        ({"position": {"name": "pattern", "layers": ["a", "b"], "kinds": {"a": {}}}}, "kinds"),
    ],
    ids=str,
)
def test_invalid_sizes_name_their_key(sizes, key):
    assert key in refusal(lambda: ModelSettings(**sizes), ValidationError)


@pytest.mark.parametrize(
    "name", ["rope", "he_xu", "xpos", "fope", "learned_rope", "hyperbolic", "selective_rope"]
)
def test_rotations_need_an_even_head_dim(name):
    message = refusal(lambda: Transformer(settings_of({"name": name}, head_dim=9), V, 11))
    assert "model.head_dim" in message
