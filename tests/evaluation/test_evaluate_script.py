"""evaluate.py on a run folder: the whole line, from files on disk to files on disk."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate as script
from data import open_prepared, prepare
from evaluation import EvaluationError
from model import Transformer
from training.checkpoint import save_weights_only
from training.config import load_settings
from training.run import create_run
from training.settings import RunSettings

ROOT = Path(__file__).resolve().parents[2]

POSITIONS = {
    "run": "{name: rope}",
    "learned": "{name: learned}",
    "pattern": "{name: pattern, layers: [a, b], kinds: {a: {name: rope, window: 9}, b: {name: none}}}",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a prepared corpus of 40 documents and runs with random weights."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").mkdir()
    rng = random.Random(5)
    for i in range(40):
        letters = "".join(rng.choices("abcdefgh ", k=150 + 10 * i))
        (home / "text" / f"{i:02}.txt").write_text(letters, encoding="utf-8")
    for name, position in POSITIONS.items():
        make_run(home, name, f"model.position={position}")
    return home


def make_run(home, name, position):
    settings = load_settings(
        RunSettings,
        [
            position,
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
    run = create_run(home / name, settings, prepared.tokenizer, ["test"], about)
    save_weights_only(run, model)


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


def test_text_seen_in_training_is_refused_or_dropped(home, monkeypatch, capsys):
    own = open_prepared(json.loads((home / "run" / "manifest.json").read_text())["data"])
    seen = [own.tokenizer.decode(own.train.document(i)[1:-1].tolist()) for i in (2, 3)]
    folder = home / "copies"
    folder.mkdir()
    rng = random.Random(8)
    for i in range(6):
        (folder / f"{i}.txt").write_text(" ".join("".join(rng.choices("ijklmn", k=5)) for _ in range(50)))
    (folder / "whole.txt").write_text(seen[0])
    (folder / "half.txt").write_text((folder / "1.txt").read_text()[:200][::-1] + seen[1][:200])
    words = ["data.source.name=files", f"data.source.path={folder}", "data.tokenizer.name=bytes"]
    words += ["data.valid_fraction=1", f"data.root={home / 'prepared'}"]
    copies = prepare(load_settings(RunSettings, words).data, workers=1).folder
    asked = [*SMALL[1:], "lengths=[24,48]", "spans_per_document=16", f"store={copies}", "rules=[trained]"]
    with pytest.raises(
        EvaluationError, match=r"2\d\.\d+% of the 1024 targets.*whole\.txt \((9\d|100)%\)"
    ) as caught:
        call(monkeypatch, home / "run", *asked)
    assert "half.txt" in str(caught.value) and "contamination.limit=0." in str(caught.value)
    assert capsys.readouterr().out == ""
    assert call(monkeypatch, home / "run", *asked, "contamination.limit=0.5", "folder=dropped") == 0
    out = capsys.readouterr().out
    folder = home / "run" / "evaluation" / "dropped"
    report = json.loads((folder / "results.json").read_text())
    found = report["contamination"]
    lost = sum(stop - start for start, stop in found["dropped"])
    assert lost == found["in_training"] and report["targets"] == 1024 - lost and lost > 128
    assert f"{lost} of 1024 targets" in out and report["scored_hash"] != report["targets_hash"]
    # The mean is that of what is left, for every length and for the unigram model.
    kept = np.ones(1024, dtype=bool)
    for start, stop in found["dropped"]:
        kept[start:stop] = False
    for cell in report["cells"]:
        name = report["per_target_nll"][f"trained@{cell['length']}"]
        nll = np.load(home / "run" / "evaluation" / "cells" / name)["nll"]
        assert cell["nll"] == pytest.approx(nll[kept].mean(), abs=1e-12)
        assert abs(nll.mean() - nll[kept].mean()) > 1e-6
    # Its own training text is no held-out text, which is said and no reason to stop.
    assert call(monkeypatch, home / "run", *SMALL, "lengths=[24]", "split=train", "rules=[trained]") == 0
    assert "no held-out text" in capsys.readouterr().out


def test_who_was_trained_with_bos_first_is_offered_sinks_with_bos_in_every_window_alone():
    def settings(*words):
        return load_settings(RunSettings, ["model.position.name=rope", *words])

    ours = {"data": "prepared/some"}
    for words, manifest, known in (
        (["data.packing=documents"], ours, True),
        (["data.packing=running"], ours, False),
        (["data.packing=documents", "data.bos=false"], ours, False),
        ([], {}, True),  # a model from elsewhere
        (["data.bos=false"], {}, False),
    ):
        root = settings(*words)
        begins = script.bos_first(root, manifest)
        assert bool(begins) == known
        sinks = ["model.position.window=60", "model.position.sinks=4"]
        assert script.offered(root, sinks, "every-window", begins)["sinks"] == 4
        assert script.offered(root, sinks[:1], "as-trained", begins)["window"] == 60
        if known:
            with pytest.raises(EvaluationError, match="sinks need bos=every-window"):
                script.offered(root, sinks, "as-trained", begins)
        else:
            assert script.offered(root, sinks, "as-trained", begins)["sinks"] == 4


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


def grid_of(out):
    """Rows of the printed table by rule."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows}


def test_the_matrix_is_every_rule_a_checkpoint_can_take(home, monkeypatch, capsys):
    short = [*SMALL[1:], "lengths=[24,48]", "folder=matrix"]
    assert call(monkeypatch, home / "run", "--matrix", "--verbose", *short) == 0
    out, err = capsys.readouterr()
    rows, folder = grid_of(out), home / "run" / "evaluation" / "matrix"
    report = json.loads((folder / "results.json").read_text())
    assert list(rows)[:2] == ["trained", "truncate"]
    assert {"linear", "yarn", "rerope", "streaming", "window", "log_n", "theta_x50", "drop"} < set(rows)
    assert set(report["left_out"]) == set(script.read_rules(script.RULES)) - set(rows)
    assert f"{len(report['left_out'])} built-in rules do not apply here: " in out
    assert "  extend_clip: model.position.extend belongs to learned, not to rope\n" in out
    assert f"forecast: {2 * (len(rows) - 1)} cells" in err
    # The numbers are those of the cells, the best first, and each rule of its own.
    cells = {(cell["rule"], cell["length"]): cell["nll"] for cell in report["cells"]}
    for rule, row in rows.items():
        assert row[:2] == [f"{cells[rule, length]:.3f}" for length in (24, 48)]
    last = [cells[rule, 48] for rule in rows][2:]
    assert last == sorted(last)
    # The settings beside the results are the same evaluation.
    before = (folder / "results.csv").read_bytes()
    call(monkeypatch, home / "run", folder / "settings.yaml")
    again = capsys.readouterr()
    assert "cells were measured before" in again.err and "--verbose: why" in again.out
    assert (folder / "results.csv").read_bytes() == before


def test_what_a_learned_table_cannot_place_is_a_dash_with_its_reason(home, monkeypatch, capsys):
    short = [*SMALL[1:], "lengths=[24,48]"]
    assert call(monkeypatch, home / "learned", "--matrix", *short, "folder=matrix") == 0
    out = capsys.readouterr().out
    rows = grid_of(out)
    assert rows["trained"][1] == rows["log_n"][1] == rows["window"][1] == "—"
    for rule in ("truncate", "extend_interpolate", "extend_repeat", "extend_clip"):
        assert float(rows[rule][1]) > 0
    assert "— does not exist, its positions end after 24 tokens: trained at 48; " in out
    summary = (home / "learned" / "evaluation" / "matrix" / "summary.txt").read_text()
    assert "Not measured: trained at 48: its positions end after 24 tokens." in summary
    assert "simultaneous over 3 comparisons" in summary  # those that exist
    # The same without the matrix; and refused where no rule is left.
    rules = "rules=[trained,truncate,extend_clip]"
    assert call(monkeypatch, home / "learned", *short, rules, "folder=some") == 0
    assert "its positions end after 24 tokens" in capsys.readouterr().out
    with pytest.raises(EvaluationError, match=r"length 48 is beyond .* at most 24 .* trained with 'learned'"):
        call(monkeypatch, home / "learned", *short, "folder=none")
    assert not (home / "learned" / "evaluation" / "none").exists()


def test_the_matrix_of_a_pattern_lays_a_rule_over_each_kind(home, monkeypatch, capsys):
    short = [*SMALL[1:], "lengths=[24,48]", "documents=6", "folder=matrix"]
    assert call(monkeypatch, home / "pattern", "--matrix", "--verbose", *short) == 0
    out = capsys.readouterr().out
    report = json.loads((home / "pattern" / "evaluation" / "matrix" / "results.json").read_text())
    schemes = {cell["rule"]: cell["scheme"] for cell in report["cells"] if cell["length"] == 48}
    assert schemes["yarn"] == "rope, yarn s=2 (matched), window 9 | none"
    assert schemes["window"] == "rope, window 9 | none, window 24"
    assert schemes["log_n"] == "rope, temperature log_n, window 9 | none, temperature log_n"
    assert "extend_clip: model.position.extend=clip: no kind of layer can take it; a: " in out
    assert "Sinks (window_sinks" in out
    assert "lambda: " in out and "its window of 9 is narrower" in out


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("run", "rules={mine: [model.position.name=alibi]}", "cannot become 'alibi'; legal for a checkpoint"),
        ("learned", "rules=[trained]", "at most 24 tokens"),
    ],
)
def test_illegal_overrides_leave_with_2_and_nothing_written(home, tmp_path, run, words, message):
    before = sorted((home / run).rglob("*"))
    done = subprocess.run(
        [sys.executable, ROOT / "evaluate.py", home / run, words, "lengths=[24,48]", "targets=8"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert "legal for a checkpoint trained with" in done.stderr
    assert sorted((home / run).rglob("*")) == before


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
