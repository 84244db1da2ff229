"""Import, export and import again: the same settings, bitwise equal weights, and equal logits."""

import pytest
import torch

from interop import build_model, read_folder
from interop.export.classes import choose_class
from interop.export.files import write_model
from interop.export.parity import measure
from tests.interop.export.exported import CONTROLS, GENERATED
from tests.interop.models import QUICK, ROPES, VARIANTS, variant
from tests.interop.test_parity import SHARED_ROPE
from tests.model.zoo import CASES as ZOO
from tests.model.zoo import build

# Variants that another class represents too, and those with a factor on q·k that weights absorb.
OTHER_CLASSES = {"youtu": "deepseek_v3", "granitemoehybrid, rope": "bamba"}
FOLDED = ("minicpm3, full queries", "deepseek_v3, yarn", "granitemoehybrid, rope")
QUICK_ROPES = [("llama", "yarn, all settings"), ("llama", "longrope")]
ALL = [
    *((name, None) for name in VARIANTS),
    *((family, rope) for family in SHARED_ROPE for rope in ROPES),
]
CASES = [
    pytest.param(
        *case,
        marks=()
        if (case[0] in QUICK and case[1] is None) or case in QUICK_ROPES
        else pytest.mark.slow,
    )
    for case in ALL
]


@pytest.mark.parametrize(("name", "rope"), CASES)
def test_import_export_import(name, rope, tmp_path):
    changes = {} if rope is None else {"rope_parameters": {"rope_theta": 10_000.0} | ROPES[rope]}
    theirs = variant(name, **changes)
    theirs.save_pretrained(tmp_path / "first")
    first = build_model(read_folder(tmp_path / "first"))
    choice = choose_class(first.model)
    assert choice.model_type == OTHER_CLASSES.get(name, VARIANTS[name][0]), choice.reason
    (tmp_path / "second").mkdir()
    write_model(first.model, choice, tmp_path / "second", CONTROLS)
    (parity,) = measure(first.model, tmp_path / "second", choice.model_type, [99])
    assert parity.is_met
    if name in FOLDED:
        return
    second = build_model(read_folder(tmp_path / "second"))
    assert second.shape.model == first.shape.model
    assert second.model.original_length == first.model.original_length
    weights = second.model.state_dict()
    assert weights.keys() == first.model.state_dict().keys()
    for key, weight in first.model.state_dict().items():
        assert torch.equal(weights[key], weight), key


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "pattern-alibi" else pytest.mark.slow) for case in ZOO],
)
def test_generated_folders(case, tmp_path):
    check_generated(build(case, dtype=torch.float32), tmp_path)


def test_generated_folder_of_a_linear_mixer(tmp_path):
    check_generated(
        build({"name": "rope"}, dtype=torch.float32, mixer={"name": "linear"}), tmp_path
    )


def check_generated(model, folder):
    """Their modeling file is not run, so it may be missing."""
    write_model(model, GENERATED, folder, CONTROLS)
    (folder / "modeling_sextant.py").unlink()
    found = build_model(read_folder(folder)).model
    assert found.settings == model.settings
    lengths = (found.train_length, found.original_length)
    assert lengths == (model.train_length, model.original_length)
    weights = found.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
