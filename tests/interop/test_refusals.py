"""Checkpoints that would compute something else, or are damaged, are rejected with the reason."""

import json
from dataclasses import replace
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from safetensors.torch import load_file, save_file

from errors import InteropError
from interop.build import build_model
from interop.checkpoint import read_folder
from interop.huggingface.config import read_config
from tests.files import table
from tests.interop.models import ABSENT, FIRST, variant


def change(folder, **keys) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if value != ABSENT}
    (folder / "config.json").write_text(json.dumps(config))


TABLE = table("interop/refusals.yaml")


@pytest.mark.parametrize(("keys", "named"), TABLE["configs"])
def test_unsupported_configs(folder, keys, named):
    change(folder, **keys)
    with pytest.raises(InteropError, match=f"config.json.*{named}"):
        build_model(read_folder(folder))


@pytest.mark.parametrize(("model_type", "keys", "named"), TABLE["families"])
def test_unsupported_configs_of_families(model_type, keys, named):
    config = variant(model_type).config.to_dict() | {"rope_parameters": None} | keys
    with pytest.raises(InteropError, match=f"config.json.*{named}"):
        read_config(config, "config.json")


HUGE = 10**9


@pytest.mark.parametrize(("name", "keys"), TABLE["sizes"], ids=str)
def test_sizes_that_the_weights_do_not_have(name, keys, tmp_path):
    """Refused before anything of the claimed size is allocated."""
    variant(name).save_pretrained(tmp_path)
    change(tmp_path, **keys)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(InteropError, match=f"config.json.*{next(iter(keys))} = "):
        build_model(read_folder(tmp_path))
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("settings", TABLE["generated"], ids=str)
def test_sizes_of_a_generated_folder(settings, folder):
    config = {"model_type": "sextant", "settings": settings}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InteropError, match=r"config.json.*(layers|rank) = "):
        build_model(read_folder(folder))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "bamba" else pytest.mark.slow) for name in FIRST],
)
def test_any_value_of_any_key(name, tmp_path):
    """One sentence, or a model; never another error or a large allocation."""
    variant(name).save_pretrained(tmp_path)
    checkpoint = read_folder(tmp_path)
    rotary = checkpoint.config.get("rope_parameters", {})
    before = getrusage(RUSAGE_SELF).ru_maxrss
    for value in (HUGE, -1, "x", [["x"]], {"a": [1]}, float("nan")):
        changes = [{key: value} for key in checkpoint.config]
        changes += [{"rope_parameters": rotary | {key: value}} for key in rotary]
        for keys in changes:
            try:
                build_model(replace(checkpoint, config=checkpoint.config | keys))
            except InteropError as error:
                assert "\n" not in str(error)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def spoil(folder, **tensors) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, file)


Q = "model.layers.1.self_attn.q_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({Q: None}, Q),
        ({BIAS: torch.zeros(60)}, BIAS),
        ({Q: torch.zeros(24, 60)}, rf"{Q} .*\(24, 60\), .* \(60, 24\)"),
        ({Q: torch.zeros(60, 24, dtype=torch.int8)}, f"{Q} .*I8"),
        ({Q: torch.full((60, 24), torch.nan)}, f"{Q} .*not finite"),
    ],
)
def test_invalid_tensors(folder, tensors, named):
    spoil(folder, **tensors)
    with pytest.raises(InteropError, match=named):
        build_model(read_folder(folder))


FORGED = "x\nwarning: all is well"


def test_foreign_names_stay_on_one_line(folder):
    spoil(folder, **{FORGED: torch.zeros(2)})
    with pytest.raises(InteropError) as refusal:
        build_model(read_folder(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": FORGED}}))
    with pytest.raises(InteropError) as refused_index:
        read_folder(folder)
    for message in (str(refusal.value), str(refused_index.value)):
        assert "all is well" in message
        assert "\n" not in message


def test_head_contradicting_tie_embeddings(folder):
    change(folder, tie_word_embeddings=True)
    with pytest.raises(InteropError, match=r"lm_head.weight"):
        build_model(read_folder(folder))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{broken"),
        ("config.json", b"[" * 100_000),
        ("model.safetensors", None),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{"),
        ("pytorch_model.bin", b"cos\nsystem\n(S'exit 1'\ntR."),  # a pickle, never loaded
    ],
)
def test_damaged_and_missing_files(folder, file, content):
    if file != "config.json":
        (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(InteropError, match=file):
        build_model(read_folder(folder))


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({Q: "../model-1-of-1.safetensors"}, r"\.\./model-1-of-1.safetensors"),
        ({Q: "model-2-of-2.safetensors"}, "model-2-of-2.safetensors"),
        ({Q: ["model-1-of-1.safetensors"]}, "does not contain"),
        (None, "weight_map"),
    ],
)
def test_invalid_shard_indexes(folder, places, named):
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    index = folder / "model.safetensors.index.json"
    whole = dict.fromkeys(names, "model-1-of-1.safetensors")
    index.write_text(json.dumps({"weight_map": whole}))
    assert build_model(read_folder(folder)).model.vocab_size == 53
    index.write_text(json.dumps({"weight_map": {} if places is None else whole | places}))
    with pytest.raises(InteropError, match=named):
        build_model(read_folder(folder))
