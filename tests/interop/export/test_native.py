"""Models in classes of transformers: the class, logits past the trained length, and what weights
absorb."""

import json

import pytest
import torch

from interop.export.export_folder import write_model
from interop.export.native import choose_class
from interop.export.parity import measure, parity_lengths
from tests.files import table
from tests.interop.export.exported import CONTROLS
from tests.model.zoo import build

MODELS = table("interop/export/classes.yaml")
# One of each class, and a scaled table without a kind in transformers.
QUICK = {
    "p_rope",
    "mup",
    "fixed",
    "some-sinks",
    *{keys["class"]: name for name, keys in MODELS.items()}.values(),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_class_and_logits(name, tmp_path):
    """At 1, 4 and 16 times the trained length, in passes with a cache."""
    keys = dict(MODELS[name])
    model_type = keys.pop("class")
    position = {"name": "rope", **keys.pop("position", {})}
    model = build(position, dtype=torch.float32, **keys)
    choice = choose_class(model)
    assert choice.model_type == model_type, choice.reason
    write_model(model, choice, tmp_path, CONTROLS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bos_token_id"] is config["eos_token_id"] is None
    for parity in measure(model, tmp_path, model_type, parity_lengths(model)):
        assert parity.is_met, parity


@pytest.mark.parametrize(
    ("position", "keys", "model_type", "expected"), table("interop/export/rotary.yaml"), ids=str
)
def test_rotary_parameters(position, keys, model_type, expected):
    choice = choose_class(build({"name": "rope", **position}, dim=60, **keys))
    assert choice.model_type == model_type, choice.reason
    found = choice.config.get("rope_parameters", {})
    assert {key: found[key] for key in expected} == expected
