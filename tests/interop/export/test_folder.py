"""Runs as Hugging Face folders: what is in them, and when they are not written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.settings import DataSettings
from data.tokenizers import ByteTokenizer
from data.tokenizers.settings import BytesSettings
from errors import InteropError
from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop import build_model, read_folder
from interop.export import parity
from interop.export.folder import export_folder
from interop.export.parity import parity_lengths
from interop.extras import load_extra
from interop.runs import write_run
from model import ModelSettings, Transformer
from scripts import export_model
from tests.corpora import STORIES, needs_stories
from training.checkpoint.storage import save_checkpoint
from training.config.settings import RunSettings
from training.run.directory import create_run, load

LENGTH = 16


def byte_run(folder: Path, position: dict) -> Path:
    shape = ModelSettings(dim=16, layers=2, heads=2, ffn_dim=24, position=position)
    settings = RunSettings(
        train_length=LENGTH,
        model=shape,
        data=DataSettings(tokenizer=BytesSettings()),
        training={"validation": {"targets": 8}},
    )
    model = Transformer(shape, 258, LENGTH).initialize(5)
    with torch.no_grad():
        model.head.weight.mul_(30)
        model.head.weight[256:] = 0  # control symbols would end the texts
    create_run(folder, settings, ByteTokenizer(), ["/somewhere/train.py", "configs/tiny.yaml", "a=b c"])
    save_checkpoint(folder, 7, model)
    return folder


@pytest.fixture
def run(tmp_path):
    return byte_run(tmp_path / "run", {"name": "rope"})


def test_the_command(run, tmp_path, monkeypatch, capsys):
    """A folder without code, which transformers generates from as we do, and which can be imported."""
    out = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export_model.py", str(run), "--out", str(out)])
    export_model.main()
    assert "256 tokens" in capsys.readouterr().err
    files = {path.name for path in out.iterdir()}
    assert files == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    inputs = tokenizer("ab", return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[256, 97, 98]]
    assert theirs.generation_config.eos_token_id == 257
    loaded = load(run)
    steps = Generation(loaded.model, [[256, 97, 98]], 20, SamplingParams(temperature=0))
    ids = theirs.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=20, do_sample=False
    )
    assert ids[0, 3:].tolist() == [step[0] for step in steps]
    again = build_model(read_folder(out)).model
    assert again.settings.kinds == loaded.settings.model.kinds
    assert all(torch.equal(w, again.state_dict()[name]) for name, w in loaded.model.state_dict().items())
    card = (out / "README.md").read_text()
    assert "train.py configs/tiny.yaml 'a=b c'" in card
    assert "/somewhere" not in card
    assert [row.split("|")[1].strip() for row in card.splitlines()[-3:]] == ["16", "64", "256"]


def test_overrides_weights_and_dtype(run, tmp_path):
    """A scheme without a class of transformers, in bfloat16: the file is ours and the parity is measured with
    rounded weights."""
    loaded = load(run, ["model.position.remap={name: rerope, distance: 5}"])
    done = export_folder(loaded, tmp_path / "out", dtype="bfloat16", multiples=(1, 4))
    assert done.choice.model_type is None
    assert [one.length for one in done.parity] == [16, 64]
    assert all(one.difference < 1e-5 for one in done.parity)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["settings"]["position"]["remap"] == {"name": "rerope", "distance": 5}
    assert "trust_remote_code=True" in (tmp_path / "out" / "README.md").read_text()


def test_limited_positions(tmp_path):
    loaded = load(byte_run(tmp_path / "run", {"name": "learned"}))
    assert parity_lengths(loaded.model) == [LENGTH]
    done = export_folder(loaded, tmp_path / "out")
    assert [one.length for one in done.parity] == [LENGTH]


@pytest.mark.parametrize("position", [{"name": "rope"}, {"name": "alibi"}])
def test_logits_beyond_the_tolerance_leave_nothing(position, tmp_path, monkeypatch):
    loaded = load(byte_run(tmp_path / "run", position))
    write = parity.measure

    def disturbed(model, *args):
        with torch.no_grad():
            model.layers[1].attention.wq.weight[0] += 0.5
        return write(model, *args)

    monkeypatch.setattr("interop.export.folder.measure", disturbed)
    with pytest.raises(InteropError, match=r"out was not written: at 16 tokens .*settings.yaml"):
        export_folder(loaded, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_refusals_before_any_work(run, tmp_path, monkeypatch):
    loaded = load(run)
    with pytest.raises(InteropError, match="already exists"):
        export_folder(loaded, run)
    with pytest.raises(InteropError, match="parent folder does not exist"):
        export_folder(loaded, tmp_path / "absent" / "out")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InteropError, match=r"transformers .*\[interop\]"):
        export_folder(loaded, tmp_path / "out")
    with pytest.raises(InteropError, match="transformers"):
        load_extra("transformers")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_the_newest_evaluation_is_in_the_card(run, tmp_path):
    folder = run / "evaluation" / "extension"
    folder.mkdir(parents=True)
    loaded = load(run)
    (folder / "results.json").write_text(json.dumps({"checkpoint_hash": loaded.checkpoint_hash}))
    (folder / "summary.txt").write_text("trained  3.5  4.5\n")
    (folder / "loss_by_length.png").write_bytes(b"figure")
    done = export_folder(loaded, tmp_path / "out", multiples=(1,))
    assert "trained  3.5  4.5" in (done.folder / "README.md").read_text()
    assert (done.folder / "loss_by_length.png").read_bytes() == b"figure"
    (folder / "results.json").write_text(json.dumps({"checkpoint_hash": "of another checkpoint"}))
    shutil.rmtree(done.folder)
    export_folder(load(run), tmp_path / "out", multiples=(1,))
    assert not (tmp_path / "out" / "loss_by_length.png").exists()


@needs_stories
def test_imported_stories_are_exported_unchanged(tmp_path):
    """The folder that the run was imported from and the exported one have the same tensors."""
    run = tmp_path / "run"
    write_run(read_folder(STORIES / "hf"), run, STORIES / "tok512.model")
    done = export_folder(load(run), tmp_path / "out", multiples=(1,))
    assert done.choice.model_type == "llama"
    first, second = (load_file(folder / "model.safetensors") for folder in (STORIES / "hf", tmp_path / "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
