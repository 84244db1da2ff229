"""The settings of a run: which of them identify it, and the shipped files."""

import subprocess
import sys

import pytest

from evaluation.protocols import settings_class
from run_directory.run_settings import RunSettings
from settings.load import apply_overrides, dropped_settings, identity, load_settings
from studies.options import study_of
from tests.files import ROOT

CONFIGS = ROOT / "configs"
FILES = [file for file in sorted(CONFIGS.rglob("*.yaml")) if file.parent.name != "accelerate"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_shipped_files_are_valid(file):
    """With what a file leaves open: the parent of an extension run, the tokens of a schedule."""
    folder = file.relative_to(CONFIGS).parts[0]
    text = file.read_text()
    if file.name == "methods.yaml":
        return  # method labels with overrides, not settings
    if "grid:" in text:
        if file.parent.name != "base":  # what claims have in common
            study_of([str(file)])
    elif folder in ("evaluation", "tasks") and "train_length:" not in text and "data:" not in text:
        load_settings(settings_class([str(file)]), [str(file)])
    else:
        overrides = ["parent.run=x"] if folder == "extension" else []
        overrides += ["training.tokens=100M"] if folder == "wsd" else []
        load_settings(RunSettings, [str(file), *overrides])


def test_settings_dropped_by_a_later_choice_are_reported(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("training:\n  optimizer:\n    lr: 0.001\n    weight_decay: 0.1\n")

    def warnings(*overrides: str) -> list[str]:
        arguments = [str(file), *overrides]
        return dropped_settings(load_settings(RunSettings, arguments), arguments)

    (warning,) = warnings("training.optimizer.name=muon")  # weight_decay is the same
    assert warning.startswith(f"{file}:3: training.optimizer.lr = 0.001")
    for others in (
        ["training.optimizer.name=muon", "training.optimizer.lr=0.004"],
        ["training.optimizer={name: muon, lr: 4e-3}"],
        ["training.optimizer.lr=0.004"],
        ["model.position.name=alibi"],
    ):
        assert warnings(*others) == []


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


def test_settings_files_of_earlier_versions_keep_their_identity(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("data: {group_bytes: null, skip: null}\ntraining: {rank_timeout: 1800.0}\n")
    assert load_settings(RunSettings, [str(file)]) == RunSettings()


def test_settings_of_data_training_and_evaluation_import_without_torch():
    modules = "data.data_settings, run_directory.training_settings, evaluation.evaluation_settings"
    code = f"import sys, {modules}\nassert not {{'torch', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parent, check=True, timeout=60)
