"""Forks: a run continues in another directory under changed settings."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import train
from data.sampling.exposure import read_exposure
from errors import TrainingError
from run_directory.checkpoints import find_checkpoint, folder_of
from run_directory.exposure import exposure_of
from run_directory.run import Run
from run_directory.run_names import name_stem
from run_directory.weights import save_weights
from tests.training.test_train import lines

WSD = Path(__file__).resolve().parents[3] / "configs" / "wsd"
SHORT = ["training.lr_schedule.warmup=3", "training.lr_schedule.decay=4"]
STEM = [
    WSD / "stem.yaml",
    *SHORT,
    "training.tokens=3072",
    "training.checkpoint={interval: 4, keep: 1, keep_interval: 4}",
]  # 16 steps
DECAY = [WSD / "decay.yaml", *SHORT, "training.tokens=2304"]  # the last 4 of 12 steps


def trained(*argv: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *map(str, argv)])
        return train.main()


@pytest.fixture(scope="module")
def base(corpus, prepared_root) -> list[str]:
    return [
        *("train_length=24", "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
        *("data.source.name=files", f"data.source.path={corpus}", "data.tokenizer.name=bytes"),
        *("data.valid_fraction=0.2", f"data.root={prepared_root}", "training.batch_size=8"),
        *(
            "training.validation.interval=4",
            "training.validation.spans=4",
            "training.validation.targets=8",
        ),
        "training.samples.prompts=[]",
        "training.precision=float32",
    ]


@pytest.fixture(scope="module")
def stem(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "stem"
    assert trained(*base, *STEM, "--run-dir", folder) == 0
    return folder


def content(folder: Path, name: str) -> bytes:
    return (find_checkpoint(folder).folder / name).read_bytes()


def about(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_decay_fork_equals_run_with_same_budget(base, stem, tmp_path, capsys):
    whole = tmp_path / "whole"
    decay = tmp_path / "decay"
    assert trained(*base, *STEM, *DECAY, "--run-dir", whole) == 0
    capsys.readouterr()
    assert trained(*DECAY, "parent.checkpoint=8", "--fork", stem, "--run-dir", decay) == 0
    output = capsys.readouterr().err
    assert (
        f"fork of {stem}: continues after step 8" in output
        and "learning rates before" not in output
    )
    assert "changed in the fork: training.tokens: 3072 → 2304" in output
    assert output.count("changed in the fork: ") == 1
    assert lines(decay) == [line for line in lines(whole) if line["step"] > 8]
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert content(decay, name) == content(whole, name), name
    # Not because nothing happened: the stem at that step is another model.
    stem_then = folder_of(stem, 12) / "model.safetensors"
    assert stem_then.read_bytes() != content(decay, "model.safetensors")
    (own,) = about(decay)["lineage"]
    assert own["run"] == str(stem) and own["step"] == 8 and own["fork"] is True
    assert (
        own["checkpoint_hash"]
        == find_checkpoint(stem, None, 8).hash
        == find_checkpoint(decay, None, 8).hash
    )
    assert own["changed"] == ["training.tokens: 3072 → 2304"]
    # What it was shown is what the whole run was shown, read or counted again.
    for shown in (read_exposure(decay), exposure_of(Run(decay), 12), exposure_of(Run(decay), 10)):
        assert shown.positions.tolist() == [shown.steps * 8] * 24
    assert read_exposure(decay).distances.tolist() == read_exposure(whole).distances.tolist()

    # It resumes as any run, with the stem gone, and can be forked itself.
    kept = {name: content(decay, name) for name in ("model.safetensors", "optimizer.safetensors")}
    logged = lines(decay)
    shutil.rmtree(folder_of(decay, 12))
    away = stem.rename(stem.with_name("away"))
    try:
        overrides = [*DECAY, "parent.checkpoint=8", "--fork", stem, "--run-dir", decay]
        assert trained(*overrides) == 0
    finally:
        away.rename(stem)
    assert lines(decay) == logged and all(content(decay, name) == raw for name, raw in kept.items())
    again = tmp_path / "again"
    assert trained("training.tokens=2496", "--fork", decay, "--run-dir", again) == 0
    near, far = about(again)["lineage"]
    assert (near["run"], near["step"], far["run"], far["step"]) == (str(decay), 12, str(stem), 8)
    assert read_exposure(again).positions.tolist() == [13 * 8] * 24
    assert "learning rates before it differ" in capsys.readouterr().err


def test_dry_run_of_a_fork_shows_what_is_left(base, stem, capsys):
    words = [*DECAY, "--fork", stem, "parent.checkpoint=8", "--dry-run", "training.on_spike={}"]
    assert trained(*words) == 0
    out = capsys.readouterr().out
    for text in ("fork of", "step 8", "4 are left after step 8", "for all steps)", "on_spike"):
        assert text in out


def test_fork_settings_override_checkpoint(base, stem, tmp_path):
    """Moments go on; weight decay, betas and the rate are the fork's."""
    fork = tmp_path / "fork"
    same = tmp_path / "same"
    overrides = ["training.optimizer.weight_decay=0.7", "training.optimizer.betas=[0.5,0.6]"]
    assert trained(*overrides, "parent.checkpoint=12", "--fork", stem, "--run-dir", fork) == 0
    saved = json.loads(content(fork, "state.json"))["optimizer"]["groups"]
    assert saved[0]["options"]["weight_decay"] == 0.7 and saved[0]["options"]["betas"] == [0.5, 0.6]
    # A fork that changes nothing is the run itself.
    assert trained("parent.checkpoint=12", "--fork", stem, "--run-dir", same) == 0
    assert content(same, "model.safetensors") == content(stem, "model.safetensors")
    assert content(fork, "model.safetensors") != content(stem, "model.safetensors")


def test_resume_with_other_settings_suggests_fork(base, stem):
    overrides = ["training.optimizer.lr=1e-3", "seed=3", "training.log_interval=2"]
    before = (stem / "manifest.json").read_bytes()
    with pytest.raises(TrainingError) as error:
        trained(*base, *STEM, *overrides, "--run-dir", stem)
    text = str(error.value)
    assert f"--fork {stem} instead of --run-dir" in text and "--restart" in text
    assert "\n       seed: 0 → 3\n       training.optimizer.lr: 0.002 → 0.001" in text
    assert "log_interval" not in text  # declared safe
    assert (stem / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.dim=64", "training.batch_size=4"],
            "model.dim: .*\n.*batch_size: ",
        ),
        (["model.position.window=5"], "model.position.window: .* training.stages"),
        (["train_length=48"], "train_length: "),
        (["data.tokenizer={name: sentencepiece}"], "data.tokenizer: "),
        (
            ["training.tokens=1536"],
            "is 8 steps, .* is at step 16: .* above 3072",
        ),
        (
            [
                'training.stages=[{duration: 3}, {overrides: ["model.position.window=9"]}]',
                "training.tokens=4000",
            ],
            "training.stages before step 16 ",
        ),
        (["parent.checkpoint=5"], "no checkpoint of step 5; it has 4, 8, 12, 16"),
        (
            ["training.optimizer.groups={head: {lr: 1e-3}}", "training.tokens=4000"],
            "are matrices, embeddings, vectors in the parent, .* matrices, head, embeddings, "
            "vectors",
        ),
    ],
)
def test_invalid_forks_are_rejected_without_files(stem, tmp_path, overrides, message):
    with pytest.raises(TrainingError, match=f"(?s){message}"):
        trained(*overrides, "--fork", stem, "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def rates(capsys, stem, *overrides: str) -> list[str]:
    """What a fork's dry run says of its learning rate."""
    assert trained(*overrides, "--fork", stem, "--dry-run") == 0
    output = " ".join(capsys.readouterr().out.replace("│", " ").split())
    return re.findall(r"after the fork (\w+(?: \w+)? at step .*? here)", output)


def test_fork_requires_optimizer_state(stem, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(stem, bare)
    shutil.rmtree(bare / "checkpoints")
    loaded = Run.open(stem).load(checkpoint=16)
    save_weights(bare, 16, loaded.model)
    with pytest.raises(TrainingError, match=r"parent\.run=.* without --fork"):
        trained("training.tokens=4000", "--fork", bare, "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_fork_of_missing_run_and_of_itself(stem, tmp_path):
    with pytest.raises(TrainingError, match="no such run directory"):
        trained("--fork", tmp_path / "none")
    with pytest.raises(TrainingError, match=r"parent\.run"):
        trained("--fork", stem, "--run-dir", stem)


def test_fork_has_its_own_name():
    overrides = ["parent.run=runs/stem.v2", "parent.fork=true"]
    assert (
        name_stem(overrides) == "stem.v2" and name_stem(["configs/tiny.yaml", *overrides]) == "tiny"
    )
    assert name_stem(overrides[:1]) == "default"
