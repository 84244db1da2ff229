"""`gguf:FILE` wherever a run is accepted, and the export of a run."""

import sys

import pytest
import torch

import generate
from data import ByteTokenizer
from errors import InteropError
from interop.gguf import write_gguf
from interop.gguf.export import export_gguf
from interop.gguf.reading.file import GGUFFile
from interop.runs import run_of
from run_directory.console import Console
from run_directory.run import Run
from scripts import export_model, import_model
from tests.interop.gguf.models import ROPE, logits, random_transformer, scaled


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = random_transformer({"position": scaled("ntk", factor=4)})
    write_gguf(model, ByteTokenizer(), tmp_path / "small.gguf")
    return tmp_path / "small.gguf"


def test_file_instead_of_a_run(file, monkeypatch, capsys):
    run = Run.open(run_of(f"gguf:{file}")).load()
    expected = random_transformer({"position": scaled("ntk", factor=4)})
    ids = list(b"some text") * 10
    torch.testing.assert_close(logits(run.model, ids), logits(expected, ids), rtol=0, atol=1e-4)
    assert run.tokenizer.encode("né") == ByteTokenizer().encode("né")
    assert run_of(f"gguf:{file}") == run.folder  # imported once
    monkeypatch.setattr(
        sys, "argv", ["generate.py", f"gguf:{file}", "--prompt", "a", "--greedy", "--tokens", "4"]
    )
    generate.main()
    assert capsys.readouterr().out.startswith("a")


def test_import_script(file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["import_model.py", f"gguf:{file}", "--out", "run"])
    import_model.main()
    assert Run.open("run").load().model.vocab_size == 258
    for wrong in ("absent.gguf", "run/settings.yaml"):
        with pytest.raises(InteropError, match=r"no such file|not a GGUF file"):
            Run.open(run_of(f"gguf:{wrong}")).load()


def test_export_script(file, monkeypatch, capsys):
    """A run to a file, to a run, to a file: the same tensors."""
    run = run_of(f"gguf:{file}")
    out = ["--out", "again.gguf", "--multiples", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["export_model.py", str(run), "--format", "gguf", *out])
    export_model.main()
    capsys.readouterr()
    first = GGUFFile(file).tensors
    again = GGUFFile("again.gguf").tensors
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(again[name].read(), tensor.read(), rtol=1e-6, atol=0)
    with pytest.raises(InteropError, match="already exists"):
        export_model.main()


def test_differing_logits_are_not_exported(file, monkeypatch, tmp_path):
    run = Run.open(run_of(f"gguf:{file}")).load()
    other = random_transformer({"position": ROPE})
    monkeypatch.setattr("interop.gguf.export.is_installed", lambda: True)
    found = {"logits": logits(other, [1] * 64).numpy()}
    monkeypatch.setattr("interop.gguf.export.run_jobs", lambda jobs: [found])
    with pytest.raises(InteropError, match="was not written"):
        export_gguf(run, tmp_path / "out.gguf", multiples=[1], console=Console())
    assert not [path for path in tmp_path.iterdir() if "out.gguf" in path.name]
    monkeypatch.setattr("interop.gguf.export.is_installed", lambda: False)
    done = export_gguf(run, tmp_path / "out.gguf", multiples=[1], console=Console())
    assert done.path.is_file() and done.differences is None
