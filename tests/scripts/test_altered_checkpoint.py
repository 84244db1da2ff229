"""Every command that reads a run, on one whose newest checkpoint is altered. For studies, see
tests/studies/test_study.py."""

import json
import re
import shutil
from pathlib import Path

import pytest

import evaluate
import generate
import sextant
import train
from errors import TrainingError
from run_directory.checkpoints import folder_of
from scripts import export_model
from tests.files import results_of
from tests.training.conftest import corpus, prepared_root, settings_of_runs, whole  # noqa: F401
from tests.training.tiny import same, weights


@pytest.fixture
def altered(whole, tmp_path) -> Path:  # noqa: F811
    """A run whose weights of step 12 are altered."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = folder_of(run, 12) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return run


def test_commands_that_measure_or_copy_the_weights_refuse(altered, tmp_path, call):
    place = re.escape(str(folder_of(altered, 12)))
    message = rf"{place}: model\.safetensors is altered.* step 9, which is intact"
    measure = [str(altered), "lengths=[24]", "targets=8", "device=cpu", "folder=a"]
    for refused in (
        lambda: call(evaluate.main, *measure),
        lambda: call(export_model.main, altered, "--out", tmp_path / "export"),
        lambda: train.main([f"parent.run={altered}", "--run-dir", str(tmp_path / "extended")]),
        lambda: sextant.load(altered),
    ):
        with pytest.raises(TrainingError, match=message):
            refused()
    shutil.move(folder_of(altered, 12), tmp_path)
    call(evaluate.main, *measure)
    assert results_of(altered / "evaluation" / "a")["checkpoint_step"] == 9


def test_generation_warns(altered, call, capsys):
    call(generate.main, altered, "--prompt", "a", "--tokens", 1, "--jsonl")
    printed = capsys.readouterr()
    assert "going back to step 9" in printed.err
    assert json.loads(printed.out)["settings"]["step"] == 9


def test_training_resumes_from_the_older_one(altered, whole, settings_of_runs, capsys):  # noqa: F811
    assert train.main([*settings_of_runs, "--run-dir", str(altered)]) == 0
    assert "going back to step 9" in capsys.readouterr().err
    assert same(weights(altered, 12), weights(whole, 12))
