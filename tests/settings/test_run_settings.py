"""The settings of a run: which of them identify it, and the shipped files."""

import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.evaluation_settings import settings_class
from run_directory.run_settings import RunSettings
from settings.load import apply_overrides, identity, load_settings
from studies.study_options import study_of
from tests.files import ROOT

CONFIGS = ROOT / "configs"
OTHERS = ("accelerate", "benchmark")  # files of accelerate and of scripts/gpu_acceptance.py
FILES = [file for file in sorted(CONFIGS.rglob("*.yaml")) if file.parent.name not in OTHERS]


def missing(file: Path) -> list[str]:
    """Overrides that give what a file leaves open: the parent of an extension run, the tokens of a
    schedule."""
    of_folder = {"extension": ["parent.run=x"], "wsd": ["training.tokens=100B"]}
    return of_folder.get(file.parent.name, [])


def is_of_a_run(file: Path) -> bool:
    """Whether a file has settings of train.py, not of a study, an evaluation or a method."""
    text = file.read_text()
    is_evaluation = file.relative_to(CONFIGS).parts[0] in ("evaluation", "tasks")
    is_training = not is_evaluation or "train_length:" in text or "data:" in text
    return is_training and "grid:" not in text and file.name != "methods.yaml"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_shipped_files_are_valid(file):
    if is_of_a_run(file):
        load_settings(RunSettings, [str(file), *missing(file)])
    elif "grid:" in file.read_text():
        if file.parent.name != "base":  # what claims have in common
            study_of([str(file)])
    elif file.name != "methods.yaml":
        load_settings(settings_class([str(file)]), [str(file)])


def test_steps_follow_from_the_token_budget():
    overrides = ["train_length=30", "training.batch_size=7", "training.tokens=2099"]
    s = load_settings(RunSettings, [*overrides, "training.validation.targets=8"])
    assert (s.tokens_after(1), s.steps, s.trained_tokens) == (210, 9, 1890)


def test_identity_depends_on_settings_that_affect_weights():
    s = RunSettings()
    shaping = [
        "training.tokens=3M", "training.lr_schedule.warmup=0.1", "training.batch_size=16", "seed=1",
        "training.precision=float64", "model.position.theta=5e5", "data.packing=intra_document",
        "training.ema={}", "model.mlp_bias=true",
    ]  # fmt: skip
    free = [
        "training.log_interval=1", "training.checkpoint.interval=3", "training.wandb.mode=offline",
        "training.samples.prompts=[x]", "training.micro_batch_size=4",
    ]  # fmt: skip
    changed = {word: apply_overrides(s, [word]) for word in [*shaping, *free]}
    assert s not in changed.values()
    assert {word for word in changed if identity(changed[word]) == identity(s)} == set(free)
    # Directories of earlier runs are named by it.
    tiny = load_settings(RunSettings, [str(CONFIGS / "tiny.yaml")])
    assert (identity(s), identity(tiny)) == ("57c6b4618a", "c3713eca9f")


def test_settings_of_data_training_and_evaluation_import_without_torch():
    modules = "data.data_settings, run_directory.training_settings, evaluation.evaluation_settings"
    code = f"import sys, {modules}\nassert not {{'torch', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parent, check=True, timeout=600)
