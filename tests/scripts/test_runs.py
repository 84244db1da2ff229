"""scripts/runs.py lists completed, running, stopped, imported and damaged runs."""

import fcntl
import json
import shutil

import pytest

from data.tokenizers import ByteTokenizer
from errors import TrainingError
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from scripts import runs


@pytest.fixture
def folder(tmp_path):
    """Runs of 4 steps (of 8 × 32 tokens), one for each status."""
    overrides = {
        "train_length": 32,
        "training": {"tokens": 1024, "batch_size": 8, "validation": {"targets": 8}},
    }
    settings = RunSettings.model_validate(overrides)
    for name, steps in (("a", 4), ("b", 2), ("c", 2), ("d", 0), ("e", 0)):
        Run.create(
            tmp_path / name,
            settings,
            ByteTokenizer(),
            ["test"],
            {"data": "x" if name != "d" else None},
        )
        lines = [{"kind": "start", "step": 0}]
        lines += [{"kind": "train", "step": n, "loss": 9.0 - n} for n in range(1, steps + 1)]
        lines += (
            [{"kind": "validation", "step": steps, "nll": {"32": 5.25, "64": 7.0}}] if steps else []
        )
        text = "".join(json.dumps(line | {"attempt": 1}) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "e" / "settings.yaml").write_text("train_length: none\n")
    return tmp_path


def test_run_statuses(folder):
    with open(folder / "c" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = {
            name: dict(zip(runs.COLUMNS, runs.row_of(folder / name), strict=True))
            for name in "abcde"
        }
    statuses = [rows[name]["status"] for name in "abcd"]
    assert (
        statuses == ["done", "stopped", "training", "imported"]
        and "train_length" in rows["e"]["status"]
    )
    a = rows["a"]
    b = rows["b"]
    assert (a["scheme"], a["length"], a["tokens"], a["steps"]) == ("rope", "32", "1,024", "4/4")
    assert (a["loss"], a["validation"]) == ("5.0000", "5.2500")
    assert (b["tokens"], b["steps"], b["loss"]) == ("512", "2/4", "7.0000")


def test_later_attempt_supersedes_earlier_steps(folder):
    with open(folder / "b" / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"kind": "start", "step": 1, "attempt": 2}) + "\n")
    row = dict(zip(runs.COLUMNS, runs.row_of(folder / "b"), strict=True))
    assert (row["loss"], row["validation"], row["steps"]) == ("8.0000", "—", "1/4")


def test_runs_are_found_recursively(folder, monkeypatch, capsys):
    (folder / "study").mkdir()
    shutil.move(folder / "b", folder / "study" / "b")
    monkeypatch.setattr("sys.argv", ["runs.py", str(folder)])
    assert runs.main() == 0
    out = capsys.readouterr().out
    assert all(str(folder / name) in out for name in ("a", "study/b", "c", "d", "e"))
    monkeypatch.setattr("sys.argv", ["runs.py", str(folder / "a" / "tokenizer")])
    with pytest.raises(TrainingError):
        runs.main()
