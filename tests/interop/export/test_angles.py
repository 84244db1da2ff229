"""The check at export fails for a wrong angle, amplitude or order of rows, at any length."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from errors import InteropError
from interop.export.export_folder import write_model
from interop.export.native import choose_class
from interop.export.parity import MULTIPLES, measure, rotations
from interop.huggingface.weight_names import to_half
from tests.interop.export.exported import CONTROLS
from tests.model.zoo import TRAIN, build

YARN = {"name": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.2}
# change -> (key of rope_parameters, its factor)
CHANGES = {"theta": ("rope_theta", 1.001), "attention factor": ("attention_factor", 1.001)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    position = {"name": "rope", "layout": "interleaved", "scaling": YARN}
    model = build(position, dtype=torch.float32, dim=60)
    choice = choose_class(model)
    assert choice.model_type == "llama"
    write_model(model, choice, folder, CONTROLS)
    return model, folder


@pytest.mark.parametrize("multiple", MULTIPLES)
@pytest.mark.parametrize("change", [None, *CHANGES, "permutation"])
def test_differing_exports(change, multiple, exported, tmp_path):
    model, folder = exported
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    if change in CHANGES:
        key, factor = CHANGES[change]
        parameters = config["rope_parameters"]
        parameters[key] = factor * parameters.get(key, 0.1 * math.log(YARN["factor"]) + 1)
    if change == "permutation":  # of the rows of one projection, in one layer
        name = "model.layers.1.self_attn.k_proj.weight"
        heads = model.settings.kv_heads
        rotated = model.settings.head_dim
        weights[name] = to_half(weights[name], heads, rotated).contiguous()
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    lengths = [multiple * TRAIN]
    if change is None:
        assert all(one.is_met for one in measure(model, tmp_path, "llama", lengths))
    elif change == "permutation":
        assert not any(one.is_met for one in measure(model, tmp_path, "llama", lengths))
    else:
        with pytest.raises(InteropError, match="other angles or amplitudes"):
            list(measure(model, tmp_path, "llama", lengths))


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 5_000_000.0])
@pytest.mark.parametrize("head_dim", [10, 64, 128])
def test_bound_is_met_and_close(head_dim, theta):
    """transformers' own tables are within the bound, and their errors are not much smaller, at
    positions far beyond those of any test with a model."""
    model = build({"name": "rope", "theta": theta}, dtype=torch.float32, head_dim=head_dim)
    (exact,) = rotations(model, TRAIN)
    config = LlamaConfig(
        head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    positions = torch.cat([torch.arange(4096), torch.tensor([65_535, 131_071])])[None]
    found = torch.stack(LlamaRotaryEmbedding(config)(torch.zeros(1), positions)).double()
    ratio = (found - exact.tables(positions)).abs() / exact.bound(positions)
    assert ratio.max() <= 1
    assert ratio[:, 0, 100:].max() > 1 / 50
