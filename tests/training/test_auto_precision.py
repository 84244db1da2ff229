"""`training.precision=auto`: a rule of the hardware and the width, kept by the run."""

import json

import pytest
import torch

from run_directory import precision
from run_directory.precision import auto_precision, resolve_precision
from run_directory.run import model_hash
from run_directory.run_names import run_folder
from run_directory.run_settings import RunSettings
from settings.load import dump, identity, load_settings

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def load(*words) -> RunSettings:
    return load_settings(RunSettings, ["model.dim=192", "model.heads=6", *words])


@pytest.fixture
def hardware(monkeypatch):
    """Set the instructions of the CPU, and whether the GPU has bfloat16."""

    def has(gpu=False, **cpu):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu)

    return has


def test_choice_depends_on_the_instructions_and_the_width(hardware):
    hardware(avx512_bf16=True, gpu=True)
    narrow = load("model.dim=48")
    assert [auto_precision(load(), CPU), auto_precision(narrow, CPU)] == ["bfloat16", "float32"]
    assert [auto_precision(load(), GPU), auto_precision(narrow, GPU)] == ["bfloat16"] * 2
    hardware(amx_bf16=True)
    assert [auto_precision(load(), place) for place in (CPU, GPU)] == ["bfloat16", "float16"]
    hardware(avx512_f=True, amx_int8=True)
    assert auto_precision(load(), CPU) == "float32"


def stored(folder, settings):
    folder.mkdir(parents=True)
    text = dump(settings)
    (folder / "settings.yaml").write_text(text)
    manifest = {"model_hash": [model_hash(text)], "vocab_size": 258, "tokenizer_hash": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_choice_is_part_of_the_settings_and_of_the_identity(tmp_path):
    def resolve(chosen, restart=False):
        return resolve_precision(
            load(), lambda s: run_folder(s, [], tmp_path), lambda s: chosen, restart
        )

    (half, in_half), (full, in_full) = resolve("bfloat16"), resolve("float32")
    assert (half.training.precision, full.training.precision) == ("bfloat16", "float32")
    assert identity(half) == identity(load("training.precision=bfloat16")) != identity(full)
    assert in_half != in_full
    stored(in_half, half)
    assert resolve("bfloat16") == (half, in_half)
    assert resolve("float32") == (full, in_full)


def test_existing_run_keeps_its_precision(tmp_path):
    def resolve(folder, restart=False):
        return resolve_precision(load(), lambda s: folder, lambda s: "float32", restart)

    new = tmp_path / "new"
    stored(new, load("training.precision=bfloat16"))
    assert resolve(new)[0].training.precision == "bfloat16"
    assert resolve(new, restart=True)[0].training.precision == "float32"


def test_a_gpu_is_taken_if_there_is_one(monkeypatch, hardware):
    hardware(gpu=True)
    monkeypatch.setattr(precision, "find_device", lambda name: GPU)
    assert auto_precision(load()) == "bfloat16"
