"""evaluate.py protocol=tasks on run directories, end to end."""

import json
import sys

import pytest

import evaluate as script
from data.preparation.prepare import prepare
from errors import EvaluationError
from model import Transformer
from run_directory.checkpoints import save_weights
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from settings.load import load_settings

SHAPE = ["train_length=128", "model.dim=24", "model.layers=2", "model.heads=6", "model.kv_heads=2"]
SOURCES = {
    "items": [
        "data.source={name: task, items: 20, length: 130, task: {name: passkey, haystack: {name: "
        "filler}, queries: 3}}"
    ],
    "text": ["data.source={name: files, path: TEXT}"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run trained on items, and one trained on text, both with random weights."""
    root = tmp_path_factory.mktemp("home")
    (root / "text").mkdir()
    for i in range(16):
        (root / "text" / f"{i:02}.txt").write_text(f"Chapter {i}. The road went on and on. " * 20)
    for name, overrides in SOURCES.items():
        overrides = [word.replace("TEXT", str(root / "text")) for word in overrides]
        more = [
            "data.tokenizer.name=bytes",
            "data.valid_fraction=0.5",
            f"data.root={root / 'prepared'}",
        ]
        settings = load_settings(RunSettings, [*SHAPE, *overrides, *more])
        prepared = prepare(settings.data, workers=1)
        model = Transformer(settings.model, prepared.tokenizer.vocab_size, 128).initialize(1)
        about = {"data": str(prepared.folder), "data_hash": prepared.train.hash}
        save_weights(
            Run.create(root / name, settings, prepared.tokenizer, ["test"], about).folder, 0, model
        )
    return root


def call(monkeypatch, *overrides):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, overrides)])
    return script.main()


SMALL = ["protocol=tasks", "items=12", "haystacks=6", "lengths=[128,160]", "device=cpu"]


def test_run_is_evaluated_on_new_items_of_its_tasks(root, monkeypatch, capsys):
    methods = "methods=[trained,truncate,yarn]"
    assert call(monkeypatch, root / "items", *SMALL, methods, "folder=first") == 0
    out, err = capsys.readouterr()
    assert "\nAbove chance (33.3%) at 160 tokens: " in out and "forecast: 4 cells" in err
    folder = root / "items" / "evaluation" / "first"
    report = json.loads((folder / "results.json").read_text())
    assert report["task"] == "passkey" and report["task_settings"]["queries"] == 1
    assert (
        report["haystack"] == "filler, documents held out from training"
        and report["unit_count"] == 6
    )
    assert [(cell["method"], cell["length"]) for cell in report["cells"]] == [
        (method, length) for method in ("trained", "truncate", "yarn") for length in (128, 160)
    ]
    assert report["methods"]["yarn"]["position"]["scaling"]["name"] == "yarn"
    assert report["command"].startswith("python evaluate.py")
    # As trained and cut to the trained length are the same at the trained length.
    cells = {(cell["method"], cell["length"]): cell for cell in report["cells"]}
    assert cells["trained", 128]["unit_accuracy"] == cells["truncate", 128]["unit_accuracy"]
    before = (folder / "results.csv").read_bytes()
    call(monkeypatch, root / "items", folder / "settings.yaml")
    assert "6 of 6 cells are already done" in capsys.readouterr().err
    assert (folder / "results.csv").read_bytes() == before


def test_haystacks_use_own_validation_data(root, monkeypatch, capsys):
    assert call(monkeypatch, root / "text", *SMALL, "task.name=needle", "folder=needle") == 0
    report = json.loads((root / "text" / "evaluation" / "needle" / "results.json").read_text())
    assert report["haystack"].endswith("/valid") and report["units"]["names"][0].endswith(".txt")
    assert len(report["units"]["names"]) == 6
    assert call(monkeypatch, root / "text", *SMALL, "task.name=recall", "folder=recall") == 0
    report = json.loads((root / "text" / "evaluation" / "recall" / "results.json").read_text())
    assert report["chance"] == 0.25 and report["unit"] == "item"
    with pytest.raises(EvaluationError, match="was not trained on parity"):
        call(monkeypatch, root / "text", *SMALL, "task.name=parity")
    with pytest.raises(EvaluationError, match=r"task\.name"):
        call(monkeypatch, root / "text", *SMALL)
    with pytest.raises(EvaluationError, match=r"none of the 8 documents .* 5,001 tokens"):
        call(monkeypatch, root / "text", *SMALL, "task.name=needle", "lengths=[5000]")
    with pytest.raises(EvaluationError, match="too short for the task needle"):
        call(monkeypatch, root / "text", *SMALL, "task.name=needle", "lengths=[50]")
    assert not (root / "text" / "evaluation" / "none").exists()
