"""The shipped pass-key configuration trains a model from scratch that retrieves pass keys."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*overrides: object, cwd: Path) -> None:
    command = [sys.executable, str(ROOT / str(overrides[0])), *map(str, overrides[1:])]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_trained_model_retrieves_passkeys(tmp_path):
    """At least 400 held-out items within the trained length; the lower end of their interval is
    above 93%."""
    tasks = ROOT / "configs" / "tasks"
    run("train.py", tasks / "train_passkey.yaml", "--run-dir", tmp_path / "passkey", cwd=tmp_path)
    run("evaluate.py", tmp_path / "passkey", tasks / "train_passkey_evaluation.yaml", cwd=tmp_path)
    found = json.loads(
        (tmp_path / "passkey" / "evaluation" / "passkey" / "results.json").read_text()
    )
    assert found["items"] >= 400 and found["trained_length"] == 256 and found["chance"] == 0.25
    cell = next(
        cell for cell in found["cells"] if (cell["method"], cell["length"]) == ("trained", 128)
    )
    assert cell["wilson_low"] >= 0.93
