"""Settings of the model: what is refused, what may change after training, whose parameters are
shared."""

import pytest
from pydantic import ValidationError

from model import (
    SCHEMES,
    ModelError,
    ModelSettings,
    Transformer,
    check_override,
)
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.files import table
from tests.model.zoo import LAYERS, V, refusal, settings_of, without_pattern_scheme

# What may change after training besides window, sinks and temperature: no parameter depends on it.
ROTARY = {"theta", "scaling", "resonance", "remap"}
MAY_CHANGE = {
    "sinusoidal": {"theta", "offset", "stretch"},
    "learned": {"extend"},
    "rope": ROTARY,
    "he_xu": ROTARY,
    "p_rope": ROTARY - {"theta"},  # its share of pairs is counted at the trained theta
    "xpos": {"theta"},
    "pope": {"theta"},
    "fox": {"theta"},
    "alibi": {"slopes", "stretch"},
    "kerple": {"stretch"},
    "sandwich": {"stretch"},
    "t5": {"max_distance"},
    "fire": {"threshold"},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_settings_that_may_change_after_training(name):
    trained = settings_of({"name": name})
    may_change = {"window", "sinks", *MAY_CHANGE.get(name, ())}
    for key in set(type(trained.position).model_fields) - {"temperature"}:
        position = trained.position.model_copy(update={key: "other"})
        asked = trained.model_copy(update={"position": position})
        if key in may_change:
            check_override(trained, asked)
        else:
            assert f"model.position.{key}" in refusal(lambda a=asked: check_override(trained, a))
    for key in ModelSettings.model_fields.keys() - {"position"}:
        asked = trained.model_copy(update={key: "other"})
        assert f"model.{key}" in refusal(lambda a=asked: check_override(trained, a))


@pytest.mark.parametrize("name", ["ssmax", "head"])
def test_learned_temperatures_are_neither_added_nor_removed(name):
    learned = settings_of({"name": "rope", "temperature": {"name": name}})
    fixed = settings_of({"name": "rope", "temperature": {"name": "log_n"}})
    for trained, asked in ((learned, fixed), (fixed, learned)):
        message = refusal(lambda t=trained, a=asked: check_override(t, a))
        assert "model.position.temperature" in message


@pytest.mark.parametrize(
    ("position", "length", "expected"),
    [
        ({"name": "rope"}, 26, "rope"),
        ({"name": "rope", "theta": 500.0, "resonance": True}, 26, "rope, theta 500, resonance"),
        ({"name": "alibi", "stretch": "auto"}, 22, "alibi, stretch factor 2 (auto)"),
        ({"name": "alibi", "stretch": "auto"}, 5, "alibi, stretch factor 1 (auto)"),
        ({"name": "t5", "max_distance": 40}, 26, "t5, max_distance 40"),
        ({"name": "none", "window": 7, "sinks": 1}, 26, "none, window 7, 1 sink"),
        ({"name": "none", "window": 7, "sinks": 2}, 26, "none, window 7, 2 sinks"),
    ],
)
def test_descriptions_of_schemes(position, length, expected):
    """With the settings that differ from their defaults, for a text of `length` tokens and a model
    trained on 11."""
    assert settings_of(position).describe_positions(length, 11) == expected


INVALID = table("model/invalid_settings.yaml")


@pytest.mark.parametrize("case", INVALID, ids=str)
def test_invalid_settings_name_their_key(case):
    key, position, *more = case
    with pytest.raises((ValidationError, ModelError)) as caught:
        Transformer(settings_of(position, **dict(*more)), V, 11)
    message = str(caught.value)
    if isinstance(caught.value, ValidationError):
        message = " ".join(f"{e['loc']} {e['msg']}" for e in caught.value.errors())
    assert key in message


@pytest.mark.parametrize(
    ("position", "is_shared"),
    [
        ({"name": "rope"}, True),
        ({"name": "learned"}, True),
        ({"name": "t5"}, True),
        ({"name": "t5", "shared": False}, False),
        ({"name": "kerple"}, True),
        ({"name": "fire"}, False),
        ({"name": "fire", "shared": True}, True),
        ({"name": "alibi", "learned": True}, True),
        ({"name": "alibi", "learned": True, "shared": False}, False),
        ({"name": "learned_rope"}, True),
        ({"name": "learned_rope", "share": "layer"}, False),
        ({"name": "pope"}, False),
        ({"name": "pope", "share": "model"}, True),
        ({"name": "hyperbolic", "damping": "learned"}, False),
        ({"name": "fox"}, False),
    ],
)
def test_layers_that_share_a_scheme(position, is_shared):
    model = Transformer(settings_of(position), V, 11)
    assert len(model.position) == (1 if is_shared else LAYERS)


def test_a_kind_has_what_it_gives_and_the_rest_of_the_model():
    own = {"position": {"window": 4}, "gate": "head", "heads": 4, "kv_heads": 2}
    other = {"mixer": {"name": "linear"}, "position": {"name": "none"}}
    s = settings_of(
        {"name": "rope", "theta": 500.0}, pattern=["a", "a", "b"], kinds={"a": own, "b": other}
    )
    a, b = s.resolved_kinds.values()
    assert (a.position.theta, a.position.window, a.gate) == (500.0, 4, "head")
    assert (a.mixer.name, a.heads, a.kv_heads, a.head_dim) == ("attention", 4, 2, 10)
    assert (b.mixer.name, b.position.name, b.gate, b.heads) == ("linear", "none", "none", 6)
    assert ModelSettings(**s.model_dump(mode="json")).resolved_kinds == s.resolved_kinds


def test_records_spell_kinds_as_a_pattern_scheme():
    kinds = {"near": {"name": "rope", "window": 8}, "far": {"name": "none"}}
    position = {"name": "pattern", "layers": ["near", "far"], "kinds": kinds}
    new = without_pattern_scheme({"layers": 2, "position": position})
    assert {name: kind["position"] for name, kind in new["kinds"].items()} == kinds
    overrides = [f"model.pattern={new['pattern']}", f"model.kinds={new['kinds']}", "model.layers=2"]
    record = load_settings(RunSettings, overrides).model.positions_record()
    assert record["name"] == "pattern"
    assert record["kinds"]["near"]["window"] == 8
    assert without_pattern_scheme({"position": record})["kinds"].keys() == {"near", "far"}
