"""Consistency of the settings of a run, which of them identify it, and the shipped files."""

import subprocess
import sys
from pathlib import Path

import pytest

from errors import ConfigError
from evaluation.protocols import settings_class
from run_directory.run_settings import RunSettings
from settings.load import apply_overrides, dropped_settings, identity, load_settings
from studies.study_settings import StudySettings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(file for file in CONFIGS.rglob("*.yaml") if file.parent.name != "accelerate")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_shipped_files_are_valid(file):
    """With what a file leaves open: the parent of an extension run, the tokens of a schedule."""
    folder = file.relative_to(CONFIGS).parts[0]
    text = file.read_text()
    if file.name == "methods.yaml":
        return  # method labels with overrides, not settings
    if folder == "studies" and "grid:" in text:
        load_settings(StudySettings, [str(file)])
    elif folder in ("evaluation", "tasks") and "train_length:" not in text and "data:" not in text:
        load_settings(settings_class([str(file)]), [str(file)])
    else:
        overrides = ["parent.run=x"] if folder == "extension" else []
        overrides += ["training.tokens=100M"] if folder == "wsd" else []
        load_settings(RunSettings, [str(file), *overrides])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.tokens=8191"], "training.batch_size × train_length = 8192"),
        (["training.lr_schedule.warmup=1.5"], "training.lr_schedule.cosine.warmup|warmup"),
        (["training.lr_schedule.warmup=500"], "205% of the run's 244 steps"),
        (["training.lr_schedule={name: wsd, warmup: 0.9}"], "110%"),
        (["training.lr_schedule={name: wsd, warmup: 44, decay: 201}"], "100%"),
        (["training.lr_schedule={name: wsd, decay: 2.5}"], "training.lr_schedule.decay: 2.5"),
        (["training.optimizer={name: muon, adamw: {groups: {matrices: {lr: 1}}}}"], "Muon"),
        (["training.optimizer={name: muon, momentum: 1}"], "less than 1"),
        (["training.validation.targets=257"], "targets = 257 exceeds train_length = 256"),
        (["training.validation.multiples=[2, 2]"], "training.validation.multiples"),
        (["training.validation.multiples=[]"], "training.validation.multiples"),
        (["training.optimizer.betas=[0.9, 1]"], "training.optimizer.betas|betas"),
        (["training.micro_batch_size=33"], "micro_batch_size 33 is larger than batch_size 32"),
        (["training.lr_schedule.name=cosin"], "did you mean cosine?"),
        (
            ["training.optimizer.name=muon", "training.optimizer.positions_lr=1e-3"],
            "with muon it is training.optimizer.adamw.positions_lr",
        ),
        (["training.ema=0.99"], "(decay, start) or null; write training.ema.decay=VALUE"),
        (["training.on_spike={sigma: 0.1}"], "did you mean training.on_spike.sigmas?"),
        (["training.on_spike={cut: 3}"], "settings of training.on_spike are sigmas, window, limit"),
        (["parent=runs/x"], "write parent.run=VALUE"),
        (["training.stages=[32]"], "training.stages.0 = 32: must be a group of settings (length,"),
        (["training.stages=[{share: 0.5}]"], "training.stages.0 are length, batch_size, duration"),
        (["training.optimizer=adam"], "did you mean training.optimizer.name=adamw?"),
        (["training.theta=5"], "did you mean model.position.theta?"),
        (["training.optimizer.learning_rate=1"], "training.optimizer.learning_rate is not"),
        (["training.grad_clip=0"], "training.grad_clip = 0: out of range, must be greater than 0"),
        (["training.samples.interval=0"], "training.samples.interval = 0"),
        (["seed=-1"], "seed = -1"),
        (["model.dim=100"], "dim 100 is not divisible by heads 8"),
        (["model.kv_heads=3"], "heads 8 are not divisible by kv_heads 3"),
    ],
)
def test_invalid_settings(overrides, expected):
    with pytest.raises(ConfigError) as error:
        load_settings(RunSettings, overrides)
    assert any(text in str(error.value) for text in expected.split("|"))


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


SHAPING = (
    "training.tokens=3M", "training.lr_schedule.warmup=0.1", "training.batch_size=16",
    "training.precision=float64", "model.position.theta=5e5", "data.packing=intra_document",
    "seed=1", "training.ema={}", "model.mlp_bias=true",
)  # fmt: skip
FREE = (
    "training.log_interval=1", "training.checkpoint.interval=3", "training.wandb.mode=offline",
    "training.samples.prompts=[x]", "training.micro_batch_size=4",
)  # fmt: skip


@pytest.mark.parametrize("override", [*SHAPING, *FREE])
def test_identity_depends_on_settings_that_affect_weights(override):
    s = RunSettings()
    changed = apply_overrides(s, [override])
    assert changed != s and (identity(changed) == identity(s)) == (override in FREE)


def test_identity_of_earlier_runs():
    """Directories of runs are named by it."""
    assert identity(RunSettings()) == "57c6b4618a"
    tiny = load_settings(RunSettings, [str(CONFIGS / "tiny.yaml")])
    assert identity(tiny) == "c3713eca9f"


def test_settings_files_of_earlier_versions_keep_their_identity(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("data: {group_bytes: null, skip: null}\ntraining: {rank_timeout: 1800.0}\n")
    assert load_settings(RunSettings, [str(file)]) == RunSettings()


def test_settings_of_data_training_and_evaluation_import_without_torch():
    modules = "data.data_settings, run_directory.training_settings, evaluation.evaluation_settings, settings.load"
    code = f"import sys, {modules}\nassert not {{'torch', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parent, check=True, timeout=60)
