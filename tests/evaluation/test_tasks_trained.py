"""A model trained to find pass keys finds them: the whole line, from text to claim, in minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_passkey_within_the_trained_length(tmp_path):
    run = tmp_path / "run"
    for words in (
        ["train.py", "configs/tasks/train_passkey.yaml", f"data.root={tmp_path}", "--folder", str(run)],
        [
            "evaluate.py",
            str(run),
            "protocol=tasks",
            "items=400",
            "haystacks=80",
            "lengths=[128]",
            "folder=pass",
        ],
    ):
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=3000)
    report = json.loads((run / "evaluation" / "passkey" / "results.json").read_text())
    cell = next(one for one in report["cells"] if (one["rule"], one["length"]) == ("trained", 128))
    assert report["items"] >= 400 and report["trained_length"] == 128
    assert cell["wilson_low"] >= 0.93
