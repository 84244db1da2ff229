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


LONG = [1.0, 1.5, 2.5, 4.0, 6.0]
# Settings of the positions and of the model, the class, and some of its rotary parameters.
ROTARY = [
    (
        {"scaling": {"name": "longrope", "factor": 4.0, "long_factor": LONG}},
        {},
        "llama",
        {
            "short_factor": [1.0] * 5,
            "long_factor": LONG,
            "factor": 4.0,
            "original_max_position_embeddings": 11,
        },
    ),
    (
        {"scaling": {"name": "yarn", "factor": 4.0, "attention_factor": 1.3}},
        {"original": 8},
        "llama",
        {"rope_type": "yarn", "attention_factor": 1.3, "original_max_position_embeddings": 8},
    ),
    (
        {"scaling": {"name": "ntk", "factor": 4.0}},
        {"original": 8},
        "llama",
        {"rope_type": "longrope", "original_max_position_embeddings": 8},
    ),
    (
        {"temperature": {"name": "ministral3", "length": 4}},
        {},
        "ministral3",
        {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.1},
    ),
    ({"fraction": 0.69}, {"head_dim": 44}, "phi3", {}),  # 30 features; 44 · (30 / 44) is below 30
    ({"scaling": {"name": "linear"}}, {}, None, {}),  # depends on the declared length
]


@pytest.mark.parametrize(("position", "keys", "model_type", "expected"), ROTARY, ids=str)
def test_rotary_parameters(position, keys, model_type, expected):
    choice = choose_class(build({"name": "rope", **position}, dim=60, **keys))
    assert choice.model_type == model_type, choice.reason
    found = choice.config.get("rope_parameters", {})
    assert {key: found[key] for key in expected} == expected
