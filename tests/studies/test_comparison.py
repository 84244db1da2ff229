"""What makes a comparison of schemes fair: the same weights at the start, the same text, and saying so."""

import subprocess
from pathlib import Path

import pytest

from model import Transformer
from studies.gather import data_order, disagreements, equal_tokens
from studies.grid import Cell
from studies.settings import StudySettings
from studies.slurm import indices, write_array
from tests.studies.conftest import ROOT
from training.config import load_settings
from training.settings import RunSettings

NOVELS = load_settings(StudySettings, [str(ROOT / "configs" / "studies" / "novels.yaml")])


def start(label: str, seed: int) -> dict:
    files = [str(ROOT / word) for word in NOVELS.grid["scheme"][label]]
    settings = load_settings(RunSettings, [*files, "model.dim=32", "model.heads=4", "model.layers=4"])
    model = Transformer(settings.model, 71, settings.train_length).initialise(seed)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("label", NOVELS.grid["scheme"])
def test_schemes_of_a_seed_start_from_the_same_weights(label):
    """All weights but those that positions learn; they are most of the model, and depend on the seed."""
    ours, theirs, other = start(label, 3), start("rope", 3), start("rope", 4)
    shared = ours.keys() & theirs.keys()
    assert shared == theirs.keys()  # rotary positions learn nothing: all of their weights are shared
    assert all("position" in name for name in ours.keys() - shared)
    for name in shared:
        assert ours[name].equal(theirs[name]), name
    assert sum(not ours[name].equal(other[name]) for name in shared) >= 4 * 7  # the matrices


def entry(name: str, order: str, tokens: int = 100, seed: int = 0, **axes: str) -> dict:
    same = {"train_length": 8, "batch_size": 2, "data_hash": "d"}
    training = {"data_order": order, "tokens": tokens, "seed": seed, **same}
    return {"id": name, "axes": {"scheme": name, "seed": str(seed), **axes}, "training": training}


def test_other_text_or_more_of_it_is_noticed():
    fair = [entry("a", "x"), entry("b", "x"), entry("c", "y", seed=1), {"axes": {}, "training": None}]
    assert [group["agree"] for group in data_order(fair)] == [True, True] and equal_tokens(fair)
    found = data_order([*fair, entry("d", "z")])
    assert [group["agree"] for group in found] == [False, True] and found[0]["cells"] == 3
    assert found[0]["orders"] == {"x": ["a", "b"], "z": ["d"]}
    more = [*fair, entry("d", "x", tokens=200)]
    assert all(group["agree"] for group in data_order(more)) and not equal_tokens(more)
    assert equal_tokens(
        [entry("a", "x", size="s"), entry("a", "z", tokens=200, size="m")]
    )  # the grid's own axis
    checks = {"checks": {"data_order": found, "equal_tokens": False}}
    assert [line.split(":")[0] for line in disagreements(checks)] == [
        "cells of seed 0 were not trained on the same text in the same order",
        "schemes were not trained on equally many tokens",
    ]


def test_an_array_script_has_a_task_for_every_cell(tmp_path):
    cells = [Cell(i, {"seed": str(i)}, ()) for i in (0, 1, 2, 5, 7, 8)]
    words = ["study.py", "a file.yaml", "report.tolerance=0.1", "--folder", str(tmp_path)]
    script = write_array(tmp_path, "tiny", cells, words, ["--partition=gpu", "--time=2:00:00"])
    text = script.read_text(encoding="utf-8")
    for line in ("--array=0-2,5,7-8", "--partition=gpu", "--time=2:00:00", "--job-name=tiny"):
        assert f"#SBATCH {line}\n" in text
    assert text.startswith("#!/bin/bash\n#SBATCH") and str(Path.cwd()) in text
    assert text.rstrip().endswith('--cell "$SLURM_ARRAY_TASK_ID"') and "'a file.yaml'" in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    # What a task runs is the study itself, with its own number.
    echo = text.replace("exec ", "exec echo ")
    said = subprocess.run(
        ["bash", "-c", echo], env={"SLURM_ARRAY_TASK_ID": "5"}, capture_output=True, text=True, check=True
    ).stdout
    assert said.strip().endswith(f"study.py a file.yaml report.tolerance=0.1 --folder {tmp_path} --cell 5")


def test_runs_of_numbers():
    assert [indices(n) for n in ([3], [0, 1], [2, 1, 0, 9], [1, 3, 5])] == ["3", "0-1", "0-2,9", "1,3,5"]
