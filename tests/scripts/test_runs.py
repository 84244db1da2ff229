"""scripts/runs.py lists completed, running, stopped, imported and damaged runs."""

import json
import shutil

import pytest
from filelock import FileLock

from data.tokenizers import ByteTokenizer
from errors import TrainingError
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from scripts import runs


@pytest.fixture
def folder(tmp_path):
    """Runs of 4 steps (of 8 × 32 tokens), one for each status."""
    training = {"tokens": 1024, "batch_size": 8, "validation": {"targets": 8}}
    settings = RunSettings.model_validate({"train_length": 32, "training": training})
    for name, steps in (
        ("a", 4),
        ("b", 2),
        ("c", 2),
        ("d", 0),
        ("e", 0),
    ):
        facts = {"data": "x" if name != "d" else None}
        Run.create(tmp_path / name, settings, ByteTokenizer(), ["test"], facts)
        lines = [{"kind": "start", "step": 0}]
        lines += [{"kind": "train", "step": n, "loss": 9.0 - n} for n in range(1, steps + 1)]
        if steps:
            lines.append({"kind": "validation", "step": steps, "nll": {"32": 5.25, "64": 7.0}})
        text = "".join(json.dumps(line | {"attempt": 1}) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "e" / "settings.yaml").write_text("train_length: none\n")
    return tmp_path


def row_of(folder) -> dict[str, str]:
    return dict(zip(runs.COLUMNS, runs.row_of(folder), strict=True))


def test_run_statuses(folder):
    with FileLock(folder / "c" / ".lock"):
        *statuses, damaged = (row_of(folder / name)["status"] for name in "abcde")
    assert statuses == ["done", "stopped", "training", "imported"]
    assert "train_length" in damaged


def test_figures_of_a_run(folder):
    """Of the last attempt, without the steps that it has yet to repeat."""
    done = {"scheme": "rope", "length": "32", "tokens": "1,024", "steps": "4/4"}
    done |= {"loss": "5.0000", "validation": "5.2500"}
    assert done.items() <= row_of(folder / "a").items()
    with open(folder / "b" / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"kind": "start", "step": 1, "attempt": 2}) + "\n")
    again = {"loss": "8.0000", "validation": "—", "steps": "1/4"}
    assert again.items() <= row_of(folder / "b").items()


def test_runs_are_found_recursively(folder, call, capsys):
    (folder / "study").mkdir()
    shutil.move(folder / "b", folder / "study" / "b")
    assert call(runs.main, folder) == 0
    out = capsys.readouterr().out
    assert all(str(folder / name) in out for name in ("a", "study/b", "c", "d", "e"))
    with pytest.raises(TrainingError):
        call(runs.main, folder / "a" / "tokenizer")
