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
from model.model_settings import without_pattern_scheme
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.files import table
from tests.model.zoo import V, refusal, settings_of


@pytest.mark.parametrize("name", SCHEMES)
def test_settings_that_may_change_after_training(name):
    trained = settings_of({"name": name})
    for key in set(type(trained.position).model_fields) - {"temperature"}:
        position = trained.position.model_copy(update={key: "other"})
        asked = trained.model_copy(update={"position": position})
        if key in trained.position.test_time:
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
