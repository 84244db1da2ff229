"""`hf:...` wherever a run is accepted: imported once, then a run like any other."""

import json
import os

import pytest
import torch

import generate
import sextant
from data.preparation.tokenizer_training import train_tokenizer
from data.tokenizers.tokenizer_settings import HuggingFaceSettings
from errors import InteropError
from interop.imported_runs import IMPORTED, is_foreign, run_of
from run_directory.run import Run
from scripts import import_model
from tests.interop.models import make

TEXT = "the quick brown fox jumps over the lazy dog and the cat sat on the mat. " * 400
# of the tokenizer, and of the padded embedding
IDS = 280
ROWS = 320


def save(folder, **changes):
    """A small model with a tokenizer.json, and two end tokens in generation_config.json."""
    theirs = make("qwen2", vocab_size=ROWS, bos_token_id=None, eos_token_id=0, **changes)
    theirs.save_pretrained(folder)
    tokenizer = train_tokenizer(HuggingFaceSettings(vocab_size=IDS), [TEXT])
    content = json.loads(tokenizer.content) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    symbols = {"eos_token": "<|begin_of_text|>", "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(symbols))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    return theirs


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return save(tmp_path / "small")


def greedy(theirs, ids: list[int], count: int) -> list[int]:
    """Token by token, without the padded rows."""
    for _ in range(count):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0, -1]
        ids = [*ids, int(logits[:IDS].argmax())]
    return ids


def test_run_of_an_argument(theirs, tmp_path, capsys):
    assert run_of("runs/mine").as_posix() == "runs/mine"
    assert not is_foreign("runs/mine")
    run = run_of("hf:small")
    assert run.parent == IMPORTED
    assert run.name.startswith("small-")
    assert str(run) in capsys.readouterr().err
    loaded = Run.open(run).load()
    assert (loaded.model.vocab_size, loaded.tokenizer.vocab_size) == (ROWS, IDS)
    assert set(loaded.tokenizer.eos_ids) == {0, 1}
    assert loaded.tokenizer.bos_id is None
    assert (loaded.settings.data.bos, loaded.settings.data.eos) == (False, True)
    written = (run / "manifest.json").stat().st_mtime_ns
    assert run_of(f"hf:{tmp_path}/small") == run, "another spelling of the same folder"
    assert (run / "manifest.json").stat().st_mtime_ns == written, "imported once"
    assert capsys.readouterr().err == ""
    save(tmp_path / "small", tie_word_embeddings=True)
    assert run_of("hf:small") != run, "the files changed"


def test_generate_and_load(theirs, call, capsys):
    loaded = sextant.load("hf:small", device="cpu")
    prompt = loaded.tokenizer.encode("the quick brown")
    expected = loaded.tokenizer.decode(greedy(theirs, prompt, 12))
    options = ["--prompt", "the quick brown", "--greedy", "--tokens", "12"]
    call(generate.main, "hf:small", *options)
    assert capsys.readouterr().out == expected + "\n"


def test_extension_run(theirs, tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(6):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} " + TEXT)
    overrides = [
        "parent.run=hf:small",
        "data={source: {name: files, path: texts}, valid_fraction: 0.4}",
        "train_length=128",
        "model.position.scaling={name: linear, factor: 2}",
        "training={tokens: 1024, batch_size: 2, compile: false}",
        "training.validation={spans: 2, targets: 8}",
    ]
    loaded = sextant.train(*overrides, run_dir="extended")
    assert loaded.model.vocab_size == ROWS
    assert loaded.settings.original_length == 64
    assert loaded.settings.parent.run == str(run_of("hf:small"))
    before = Run.open(run_of("hf:small")).load().model.state_dict()["layers.0.attention.wq.bias"]
    after = loaded.model.state_dict()["layers.0.attention.wq.bias"]
    assert not torch.equal(before, after)
    assert torch.allclose(before, after, atol=0.1)


def test_failed_import_leaves_nothing(theirs, tmp_path):
    file = tmp_path / "small" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 45}))
    with pytest.raises(InteropError, match=r"gate_proj.weight has shape \(44, 24\), .* \(45, 24\)"):
        run_of("hf:small")
    (tmp_path / "small" / "tokenizer.json").unlink()
    with pytest.raises(InteropError, match=r"no tokenizer.json or tokenizer.model"):
        run_of("hf:small")
    assert not [path for path in IMPORTED.iterdir() if path.is_dir()]


def test_import_script(theirs, tmp_path, call):
    (tmp_path / "small" / "tokenizer.json").rename(tmp_path / "small" / "other.json")
    words = ["hf:small", "--tokenizer", "small/other.json", "--out", "runs/mine"]
    call(import_model.main, *words)
    assert Run.open("runs/mine").load().model.vocab_size == ROWS
    with pytest.raises(InteropError, match="already exists"):
        call(import_model.main, *words)


def test_hub_name_from_the_cache(theirs, tmp_path, monkeypatch):
    """The layout of huggingface_hub's cache; nothing is requested when the network is off."""
    commit = "a" * 40
    model = tmp_path / "cache" / "models--org--small"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    for file in (tmp_path / "small").iterdir():
        os.symlink(file, model / "snapshots" / commit / file.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = run_of("hf:org/small")
    assert run.name.startswith("org-small-")
    with pytest.raises(InteropError, match=r"hf:org/absent: .*not cached"):
        run_of("hf:org/absent")
