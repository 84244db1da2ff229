"""Runs as Hugging Face folders: what is in them, and when they are not written."""

import json
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from errors import InteropError
from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop.build import build_model
from interop.checkpoint import read_folder
from interop.export import parity
from interop.export.export_folder import export_folder
from interop.export.parity import parity_lengths
from interop.imported_runs import write_run
from run_directory.checkpoints import save_checkpoint
from run_directory.run import Run
from run_directory.training_settings import EmaSettings
from run_directory.weights import weights_of
from scripts import export_model, import_model
from tests.byte_runs import byte_run
from training.train_state import EMA

LENGTH = 16


@pytest.fixture
def run(tmp_path):
    return byte_run(tmp_path / "run", {"name": "rope"}, LENGTH, step=7)


def parity_of(folder: Path) -> dict[int, float]:
    """The lengths and differences in a model card."""
    card = (folder / "README.md").read_text()
    rows = re.findall(r"^\| *([\d,]+) *\| *([\d.e+-]+) *\|", card, re.M)
    return {int(length.replace(",", "")): float(difference) for length, difference in rows}


def test_the_command(run, tmp_path, call, capsys):
    """A folder without code, which transformers generates from as we do, and which can be
    imported."""
    out = tmp_path / "exported"
    call(export_model.main, run, "--out", out)
    assert "256 tokens" in capsys.readouterr().err
    assert not list(out.glob("*.py"))
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    theirs = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer("ab", return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[256, 97, 98]]
    assert theirs.generation_config.eos_token_id == 257
    assert theirs.generation_config.pad_token_id == 257  # bytes have no padding
    loaded = Run.open(run).load()
    steps = Generation(loaded.model, [[256, 97, 98]], 20, SamplingParams(temperature=0))
    ids = theirs.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert ids[0, 3:].tolist() == [step[0] for step in steps]
    assert build_model(read_folder(out)).model.kinds == loaded.model.kinds
    assert "trust_remote_code" not in (out / "README.md").read_text()
    assert parity_of(out).keys() == {16, 64, 256}


def test_overrides_weights_and_dtype(run, tmp_path):
    """A scheme without a class of transformers, in bfloat16: the file is ours and the parity is
    measured with rounded weights."""
    loaded = Run.open(run).load(["model.position.remap={name: rerope, distance: 5}"])
    choice = export_folder(loaded, tmp_path / "out", dtype="bfloat16", multiples=(1, 4))
    assert choice.model_type is None
    assert parity_of(tmp_path / "out") == {16: 0.0, 64: 0.0}  # the same code
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["settings"]["position"]["remap"] == {"name": "rerope", "distance": 5}
    # transformers asks about the code for the tokenizer too
    assert (tmp_path / "out" / "README.md").read_text().count(", trust_remote_code=True)") == 2


def test_average_and_last_weights(tmp_path, call):
    """The average is exported unless --weights says otherwise; both are those of the checkpoint."""
    run = byte_run(tmp_path / "run", {"name": "rope"}, step=7)
    model = Run.open(run).load().model
    first = model.embed.weight.clone()
    ema = EMA(model, EmaSettings(decay=0.5, start=0), 10)
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    ema.update(1, torch.tensor(False))
    tensors = {"model": weights_of(model), "average": ema.means}
    save_checkpoint(run, 8, tensors)
    for choice, added in (("", 0.5), ("--weights last", 1)):
        out = tmp_path / f"exported {choice}"
        call(export_model.main, run, "--multiples", 1, "--out", out, *choice.split())
        found = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
        torch.testing.assert_close(found, (first + added).detach(), rtol=0, atol=1e-6)


def test_limited_positions(tmp_path):
    loaded = Run.open(byte_run(tmp_path / "run", {"name": "learned"})).load()
    assert parity_lengths(loaded.model) == [LENGTH]
    export_folder(loaded, tmp_path / "out")
    assert parity_of(tmp_path / "out").keys() == {LENGTH}


@pytest.mark.parametrize("position", [{"name": "rope"}, {"name": "alibi"}])
def test_logits_beyond_the_tolerance_leave_nothing(position, tmp_path, monkeypatch):
    loaded = Run.open(byte_run(tmp_path / "run", position)).load()
    write = parity.measure

    def disturbed(model, *args):
        with torch.no_grad():
            model.layers[1].mixer.wq.weight[0] += 0.5
        return write(model, *args)

    monkeypatch.setattr("interop.export.export_folder.measure", disturbed)
    with pytest.raises(InteropError, match=r"out was not written: at 16 tokens .*settings.yaml"):
        export_folder(loaded, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_refusals_before_any_work(run, tmp_path, monkeypatch):
    loaded = Run.open(run).load()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InteropError, match=r"transformers .*\[interop\]"):
        export_folder(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["export", "import"])
def test_places_that_cannot_be_written(kind, run, tmp_path, monkeypatch, call):
    """Refused before the run or the checkpoint is read."""
    out = tmp_path / "dangling"
    out.symlink_to(tmp_path / "absent")
    script = import_model if kind == "import" else export_model
    source = "hf:absent" if kind == "import" else run
    monkeypatch.setattr(Run, "load", None)
    with pytest.raises(InteropError, match=re.escape(str(out))):
        call(script.main, source, "--out", out)


@pytest.mark.parametrize("kind", ["export", "import"])
@pytest.mark.parametrize("is_known", [True, False])
def test_full_disk(kind, is_known, run, tmp_path, monkeypatch):
    """Noticed before anything is written, or while it is written; nothing is left."""
    loaded = Run.open(run).load()
    checkpoint = tmp_path / "source"
    export_folder(loaded, checkpoint, multiples=(1,))
    before = set(tmp_path.iterdir())
    if is_known:
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1] if is_known else 8192, limits[1]))
    try:
        with pytest.raises(InteropError, match="disk is full") as refusal:
            if kind == "export":
                export_folder(loaded, tmp_path / "out", multiples=(1,))
            else:
                write_run(read_folder(checkpoint), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "resume" not in str(refusal.value)
    assert set(tmp_path.iterdir()) == before
