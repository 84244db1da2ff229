"""Models in classes of transformers: the class, logits past the trained length, and what weights
absorb."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from interop.export import native
from interop.export.classes import choose_class
from interop.export.files import write_model
from interop.export.parity import measure, parity_lengths
from tests.interop.export.exported import CONTROLS
from tests.model.zoo import G, H, build

MODELS = yaml.safe_load(Path(__file__).with_name("classes.yaml").read_text(encoding="utf-8"))
# One of each class, and a scaled table without a kind in transformers.
QUICK = {"p_rope", "mup", *{keys["class"]: name for name, keys in MODELS.items()}.values()}


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


def test_folded_factors():
    """A factor per head multiplies the rows of its head."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    model = build({"name": "rope", "temperature": {"name": "fixed", "value": values}})
    weights = native.weights(model, model.state_dict(), choose_class(model))
    name = "model.layers.0.self_attn.q_proj.weight"
    ratio = weights[name] / model.state_dict()["layers.0.attention.wq.weight"]
    expected = torch.arange(1.0, H + 1).double().repeat_interleave(model.settings.head_dim)
    torch.testing.assert_close(ratio, expected[:, None].expand_as(ratio))
    keys = weights["model.layers.0.self_attn.k_proj.weight"]
    assert len(keys) == G * model.settings.head_dim
    assert torch.equal(keys, model.state_dict()["layers.0.attention.wk.weight"])
