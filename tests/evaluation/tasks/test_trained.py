"""The shipped pass-key configuration trains a model from scratch that retrieves pass keys."""

from pathlib import Path

import pytest

import evaluate
import train
from tests.files import ROOT, results_of


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_trained_model_retrieves_passkeys(tmp_path, monkeypatch):
    """At least 400 held-out items within the trained length; the lower end of their interval is
    above 93%."""
    monkeypatch.chdir(tmp_path)
    tasks = ROOT / "configs" / "tasks"
    train.main([str(tasks / "train_passkey.yaml"), "--run-dir", "passkey"])
    evaluate.main(["passkey", str(tasks / "train_passkey_evaluation.yaml")])
    found = results_of(Path("passkey/evaluation/passkey"))
    assert found["items"] >= 400
    assert found["chance"] == 0.25
    cells = {(cell["method"], cell["length"]): cell for cell in found["cells"]}
    assert cells["trained", 128]["accuracy_low"] >= 0.93
