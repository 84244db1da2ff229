"""An extension run against its parent: equal at step 0, different after training."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import train
from errors import EvaluationError, TrainingError
from scripts import compare_parent

LENGTHS = ["lengths=[96]", "documents=8", "spans_per_document=2", "targets=8"]


def here(monkeypatch, main, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, argv)])
    return main()


@pytest.fixture
def family(overrides, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A parent trained at 24 tokens and an extension run at 48 under YaRN that keeps its step 0."""
    parent_run = tmp_path / "mother"
    child = tmp_path / "child"
    assert (
        here(
            monkeypatch,
            train.main,
            *overrides,
            "training.optimizer.lr=2e-2",
            "--run-dir",
            parent_run,
        )
        == 0
    )
    rule = ["model.position.scaling.name=yarn", "train_length=48", "training.checkpoint.keep=9"]
    assert here(monkeypatch, train.main, f"parent.run={parent_run}", *rule, "--run-dir", child) == 0
    return parent_run, child


def cells(child: Path) -> dict[tuple[str, int], dict]:
    found = json.loads((child / "evaluation/parent/results.json").read_text())["cells"]
    own = {cell["length"]: cell["nll"] for cell in found if cell["difference"] is None}
    return {
        (cell["method"], cell["length"]): cell | {"own": own[cell["length"]]}
        for cell in found
        if cell["difference"] is not None
    }


def test_parent_comparison_matches_training_logs(family, monkeypatch, capsys):
    parent_run, child = family
    assert here(monkeypatch, compare_parent.main, child, *LENGTHS) == 0
    assert "NLL minus that of run" in capsys.readouterr().out
    found = cells(child)
    assert set(found) == {(rule, n) for rule in ("trained", "same method") for n in (24, 48, 96)}
    for cell in found.values():
        # equally many a document
        assert cell["difference"] == pytest.approx(cell["nll"] - cell["own"])
        assert cell["low"] < cell["difference"] < cell["high"] and cell["family"] == 6
    # Nothing is stretched at the parent's length, so that the rule is what the parent was trained
    # under.
    assert found["trained", 24] | {"method": ""} == found["same method", 24] | {"method": ""}
    assert found["trained", 48]["nll"] != found["same method", 48]["nll"]

    for step in (
        path for path in (child / "checkpoints").iterdir() if path.name != "step-00000000"
    ):
        shutil.rmtree(step)
    assert here(monkeypatch, compare_parent.main, child, *LENGTHS) == 0
    begun = cells(child)
    for length in (24, 48, 96):
        assert begun["same method", length]["difference"] == 0
        assert begun["same method", length]["nll"] == found["same method", length]["nll"]
        assert begun["same method", length]["own"] != found["same method", length]["own"]
    assert begun["trained", 96]["difference"] != 0

    # What cannot be compared is refused.
    with pytest.raises(EvaluationError, match="mother is not an extension run"):
        here(monkeypatch, compare_parent.main, parent_run)
    with pytest.raises(EvaluationError, match="by-position has no lengths"):
        here(monkeypatch, compare_parent.main, child, "protocol=by-position")
    about = json.loads((child / "manifest.json").read_text())
    about["lineage"][0]["checkpoint_hash"] = "0" * 64
    (child / "manifest.json").write_text(json.dumps(about))
    with pytest.raises(EvaluationError, match=r"checkpoint 12 of .*mother is not the parent"):
        here(monkeypatch, compare_parent.main, child)
    shutil.rmtree(parent_run)
    with pytest.raises(TrainingError, match="no such run directory"):
        here(monkeypatch, compare_parent.main, child)
