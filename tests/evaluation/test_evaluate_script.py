"""evaluate.py on a run folder: the whole line, from files on disk to files on disk."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evaluate as script
from data import prepare
from evaluation import EvaluationError
from evaluation.rules import read_rules, resolve_rules
from model import Transformer, check_override
from training.checkpoint import save_weights_only
from training.config import apply_words, load_settings
from training.run import create_run
from training.settings import RunSettings

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = read_rules(script.RULES)
RULES = resolve_rules(list(BUILT_IN), BUILT_IN, 24)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a prepared corpus of 40 documents and a run with random weights."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").mkdir()
    rng = random.Random(5)
    for i in range(40):
        letters = "".join(rng.choices("abcdefgh ", k=150 + 10 * i))
        (home / "text" / f"{i:02}.txt").write_text(letters, encoding="utf-8")
    settings = load_settings(
        RunSettings,
        [
            "train_length=24",
            "training.validation.targets=8",
            "model.dim=24",
            "model.layers=2",
            "model.heads=6",
            "model.groups=2",
            "data.source.name=files",
            f"data.source.path={home / 'text'}",
            "data.tokenizer.name=bytes",
            "data.valid_fraction=0.4",
            f"data.root={home / 'prepared'}",
        ],
    )
    prepared = prepare(settings.data, workers=1)
    model = Transformer(settings.model, prepared.tokenizer.vocab_size, 24).initialise(1)
    about = {"data": str(prepared.folder), "data_hash": prepared.train.hash}
    run = create_run(home / "run", settings, prepared.tokenizer, ["test"], about)
    save_weights_only(run, model)
    return home


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
    try:
        return script.main()
    finally:
        torch.set_flush_denormal(False)  # the script's choice for its process, not for the tests after it


SMALL = ["lengths=[24,48,96]", "targets=8", "spans_per_document=2", "device=cpu"]


def test_from_run_folder_to_results(home, monkeypatch, capsys):
    rules = "rules=[trained,truncate,linear,ntk,yarn,llama3,window]"
    assert call(monkeypatch, home / "run", *SMALL, rules, "folder=first") == 0
    out, err = capsys.readouterr()
    assert out.startswith("as trained: ") and "flat by construction" in out and "forecast: 18 cells" in err
    folder = home / "run" / "evaluation" / "first"
    names = {path.name for path in folder.iterdir()}
    figures = {"nll_by_length.png", "nll_by_length.svg"}
    assert names == figures | {"results.csv", "results.json", "settings.yaml", "summary.txt", "targets.json"}
    report = json.loads((folder / "results.json").read_text())
    assert report["corpus"].endswith("/valid") and report["unigram_nll"] < 3
    assert report["command"].startswith("python evaluate.py") and len(report["cells"]) == 21
    schemes = {cell["rule"]: cell["scheme"] for cell in report["cells"] if cell["length"] == 96}
    assert schemes["yarn"] == "rope, yarn s=4 (matched)" and schemes["window"] == "rope, window 24"
    for name in report["per_target_nll"].values():
        assert (home / "run" / "evaluation" / "cells" / name).is_file()
    # Its own settings file is the same evaluation: nothing is computed again, and the numbers are the same.
    before = (folder / "results.csv").read_bytes()
    call(monkeypatch, home / "run", folder / "settings.yaml")
    assert "18 of 18 cells were measured before" in capsys.readouterr().err
    assert (folder / "results.csv").read_bytes() == before


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
def test_every_built_in_rule_is_legal_for_rotary_positions(rule):
    trained = load_settings(RunSettings, [])
    asked = apply_words(trained, list(rule.words)).model
    check_override(trained.model, asked)
    assert (asked == trained.model) == (rule.label in ("trained", "truncate"))


def test_what_cannot_work_is_one_clear_error(home, monkeypatch):
    run = home / "run"
    with pytest.raises(EvaluationError, match=r"(?s)rule 'theta'.*rule 'other'") as caught:
        rules = "rules={theta: [model.position.fraction=0.5], other: [model.position.name=alibi]}"
        call(monkeypatch, run, *SMALL, rules)
    assert "model.position.fraction" in str(caught.value)
    with pytest.raises(EvaluationError, match="unknown rule 'yarm'"):
        call(monkeypatch, run, *SMALL, "rules=[yarm]")
    with pytest.raises(EvaluationError, match="longest usable length is"):
        call(monkeypatch, run, "lengths=[4096]", "targets=8")
    with pytest.raises(ValueError, match="did you mean lengths"):
        call(monkeypatch, run, "lenghts=[24]")
    with pytest.raises(EvaluationError, match="no finished preparation"):
        call(monkeypatch, run, *SMALL, f"store={home}")
    with pytest.raises(EvaluationError, match="another tokenizer"):
        other = load_settings(
            RunSettings,
            [
                "data.source.name=files",
                f"data.source.path={home / 'text'}",
                "data.tokenizer={name: sentencepiece, vocab_size: 300}",
                "data.valid_fraction=0.4",
                f"data.root={home / 'other'}",
            ],
        )
        call(monkeypatch, run, *SMALL, f"store={prepare(other.data, workers=1).folder}")


def test_help_names_every_setting_and_errors_leave_with_2():
    done = subprocess.run(
        [sys.executable, "evaluate.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    for word in ("lengths", "spans_per_document", "tolerance", "truncate", "yarn"):
        assert word in done.stdout
    bad = subprocess.run(
        [sys.executable, "evaluate.py", "no-such-run"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert bad.returncode == 2 and bad.stderr.startswith("error: no-such-run")
