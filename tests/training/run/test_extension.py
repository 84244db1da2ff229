"""Extension runs: from a parent's weights under another method or length, and after the parent is
deleted."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from data.sampling.exposure import read_exposure
from errors import TrainingError
from evaluation.monitor import monitor_targets
from model import Transformer
from run_directory.checkpoints import find_checkpoint
from run_directory.exposure import exposure_of
from run_directory.metrics_file import read_metrics
from run_directory.parent_run import read_run_settings
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from run_directory.weights import save_weights
from settings.load import identity
from training import setup
from training.first_checkpoint import describe_comparison
from training.setup import step0_score

TUNE = ["training.tokens=960", "training.batch_size=4", "training.validation.interval=null"]
LONGER = ["train_length=48", "model.position.scaling.name=yarn", *TUNE]


def trained(monkeypatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, argv)])
    return train.main()


@pytest.fixture(scope="module")
def parent(tmp_path_factory, corpus, prepared_root):
    """A run of 12 steps at 24 tokens."""
    folder = tmp_path_factory.mktemp("runs") / "parent"
    overrides = [
        *("train_length=24", "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
        *("data.source.name=files", f"data.source.path={corpus}", "data.tokenizer.name=bytes"),
        *("data.valid_fraction=0.2", f"data.root={prepared_root}", "training.tokens=2304"),
        *("training.batch_size=8", "training.optimizer.lr=2e-2", "training.validation.spans=4"),
        *("training.validation.targets=8", "training.samples.tokens=4"),
        "training.precision=float32",
    ]
    with pytest.MonkeyPatch.context() as patch:
        assert trained(patch, *overrides, "--run-dir", folder) == 0
    return folder


@pytest.fixture(scope="module")
def branch(parent, tmp_path_factory):
    folder = tmp_path_factory.mktemp("branches") / "yarn"
    with pytest.MonkeyPatch.context() as patch:
        assert trained(patch, f"parent.run={parent}", *LONGER, "--run-dir", folder) == 0
    return folder


def about(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def weights(folder: Path, step: int | None = None) -> dict:
    return load_file(find_checkpoint(folder, None, step).folder / "model.safetensors")


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_dry_run_of_an_extension_shows_its_parent_and_changes(parent, monkeypatch, capsys):
    words = [f"parent.run={parent}", *LONGER, "--dry-run"]
    assert trained(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    for text in ("extension of", "trained at 24 tokens", "train_length: 24 → 48", "yarn"):
        assert text in out


def test_extension_inherits_parent_settings(parent, branch):
    old = Run(parent).settings
    new = Run(branch).settings
    assert (new.train_length, new.original_length, new.seed) == (48, 24, 1)
    assert (
        new.model.dim == 32
        and new.data == old.data
        and new.training.optimizer == old.training.optimizer
    )
    assert new.training.tokens == 960 and new.model.position.scaling.name == "yarn"
    assert new.model.position.scaling.stretch(48, new.original_length) == 2
    assert new.parent.hash == find_checkpoint(parent).hash and new.parent.checkpoint == 12


def test_extension_starts_from_parent_weights_with_new_positions(parent, branch):
    assert same(weights(branch, 0), weights(parent))
    assert not same(weights(branch), weights(parent))
    found = about(branch)["step0"]
    assert found["largest_difference"] == 0 and found["nll"] == found["parent_under_method"]
    assert (
        found["nll"] != found["parent_as_trained"]
        and found["length"] == 48
        and found["targets"] == 32
    )
    (line,) = read_metrics(branch / "metrics.jsonl", "step0")
    assert line["step"] == 0 and line["nll"] == found["nll"]
    # The number itself, by hand: the same targets through the parent's weights in a model built
    # here.
    settings = Run(branch).settings
    model = Run.open(parent).load(["model.position.scaling={name: yarn, factor: 2}"]).model
    score = step0_score(monitor_targets, load_prepared(branch), settings, torch.device("cpu"))
    assert score(model).mean() == pytest.approx(found["nll"], abs=1e-6)


def load_prepared(folder: Path):
    return Run(folder).open_data()


@pytest.mark.parametrize("more", [[], ["original_length=32"]])
def test_changed_parent_weights_are_detected(parent, tmp_path, monkeypatch, more):
    """The check reads the parent by another way than the branch: one weight moved on that way is an
    error, and so it is where losses cannot be compared since stretches are measured from
    elsewhere."""
    real = Run.load

    def moved(*args, **more):
        found = real(*args, **more)
        with torch.no_grad():
            next(found.model.parameters())[101, 3] += 0.5
        return found

    monkeypatch.setattr(Run, "load", moved)
    with pytest.raises(TrainingError, match="at step 0 the extension run scores "):
        trained(monkeypatch, f"parent.run={parent}", *LONGER, *more, "--run-dir", tmp_path / "x")
    assert find_checkpoint(tmp_path / "x") is None


def test_lineage_of_nested_extensions(parent, branch, tmp_path, monkeypatch):
    folder = tmp_path / "second"
    overrides = [
        f"parent.run={branch}",
        "parent.checkpoint=0",
        "train_length=96",
        "training.batch_size=2",
    ]
    assert trained(monkeypatch, *overrides, "--run-dir", folder) == 0
    near, far = about(folder)["lineage"]
    assert near["run"] == str(branch) and near["step"] == 0 and near["train_length"] == 48
    assert far["run"] == str(parent) and far["checkpoint_hash"] == find_checkpoint(parent).hash
    assert "train_length: 24 → 48" in far["changed"] and "train_length: 48 → 96" in near["changed"]
    assert any(text.startswith("model.position.scaling: none → yarn") for text in far["changed"])
    assert near["data"] == about(branch)["data"] and far["data"] == about(parent)["data"]
    assert same(weights(folder, 0), weights(parent))
    assert Run(folder).settings.original_length == 24
    # Everything behind it has been shown to it: 12 steps of 8 × 24, none yet of 48, 5 of 2 × 96.
    shown = read_exposure(folder)
    assert shown.positions.tolist() == [12 * 8 + 5 * 2] * 24 + [5 * 2] * 72
    assert shown.tokens == 12 * 8 * 24 + 960


def test_extension_resumes_without_parent(parent, tmp_path, monkeypatch):
    """... once the branch has begun: it goes on, ends as if the parent were there, and is
    evaluated."""
    parent_run, whole, cut = (tmp_path / name for name in ("mother", "whole", "cut"))
    shutil.copytree(parent, parent_run)
    overrides = [f"parent.run={parent_run}", *LONGER]
    saving = ["training.checkpoint.interval=2", "training.checkpoint.keep=9"]
    assert trained(monkeypatch, *overrides, *saving, "--run-dir", whole) == 0
    shutil.copytree(whole, cut)
    for step in (4, 5):
        shutil.rmtree(cut / f"checkpoints/step-{step:08}")
    (cut / "exposure.npz").unlink()
    shutil.rmtree(parent_run)
    assert trained(monkeypatch, *overrides, *saving, "--run-dir", cut) == 0
    assert same(weights(cut), weights(whole)) and find_checkpoint(cut).step == 5
    assert about(cut)["lineage"] == about(whole)["lineage"]
    for found in (read_exposure(cut), exposure_of(Run(cut)), exposure_of(Run(cut), 5)):
        assert found.distances.tolist() == read_exposure(whole).distances.tolist()
    (cut / "exposure.npz").unlink()
    assert exposure_of(Run(cut)).positions.tolist() == [12 * 8 + 5 * 4] * 24 + [5 * 4] * 24
    assert Run.open(cut).load().settings.original_length == 24
    with pytest.raises(TrainingError, match=r"other settings.*\n.*model.position.scaling"):
        trained(monkeypatch, f"parent.run={parent_run}", *TUNE, "train_length=48", "--run-dir", cut)
    with pytest.raises(TrainingError, match="no such run directory"):
        trained(monkeypatch, *overrides, "--run-dir", tmp_path / "new")


def test_identity_depends_on_parent_weights_not_path(parent, tmp_path, overrides):
    other = tmp_path / "elsewhere"
    shutil.copytree(parent, other)
    first, second = (
        read_run_settings([f"parent.run={run}", *LONGER])[0] for run in (parent, other)
    )
    assert identity(first) == identity(second)
    changed = load_file(other / "checkpoints/step-00000012/model.safetensors")
    shutil.rmtree(other / "checkpoints")
    model = Run.open(parent).load().model
    with torch.no_grad():
        next(model.parameters()).add_(1)
    save_weights(other, 12, model)
    assert changed.keys() and identity(
        read_run_settings([f"parent.run={other}", *LONGER])[0]
    ) != identity(first)
    with pytest.raises(TrainingError, match=r"parent.hash is "):
        read_run_settings([f"parent.run={other}", f"parent.hash={first.parent.hash}", *LONGER])
    # A run from nothing is named as it was before there were branches.
    plain, parent_of_none = read_run_settings(overrides)
    assert parent_of_none is None and identity(plain) == identity(
        RunSettings.model_validate(plain.model_dump())
    )
    message = plain.model_dump(mode="json")
    assert message.pop("parent") is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parent.run=nowhere"], "parent.run: nowhere: no such run directory"),
        (["parent={checkpoint: 3}"], r"parent\.run is missing"),
        (["parent.run={parent}", "parent.checkpoint=7"], "no checkpoint of step 7; it has 12"),
        (["parent.run={parent}", "model.dim=64"], "model.dim "),
        (["parent.run={parent}", "model.layers=3"], "model.layers "),
        (
            ["parent.run={parent}", "model.position.fraction=0.5"],
            "model.position.fraction cannot be changed",
        ),
        (
            ["parent.run={parent}", "model.position.name=learned"],
            "weights of .* do not fit: .*is new",
        ),
        (
            ["parent.run={parent}", "train_length=2048"],
            "longer than every document of .*the longest has",
        ),
        (
            [
                "parent.run={parent}",
                "data.source.name=stdlib",
                "data.tokenizer={name: sentencepiece}",
            ],
            r"another tokenizer \(0{12}\)",
        ),
    ],
)
def test_invalid_extensions_are_rejected_without_files(
    parent, tmp_path, monkeypatch, overrides, message
):
    overrides = [word.replace("{parent}", str(parent)) for word in overrides]
    real = setup.prepare

    # the text of another tokenizer, without the minute it takes to make
    def prepare(data, console):
        prepared = real(Run(parent).settings.data, console)
        if data.tokenizer.name == "sentencepiece":
            monkeypatch.setattr(type(prepared.tokenizer), "hash", "0" * 64)
        return prepared

    monkeypatch.setattr(setup, "prepare", prepare)
    with pytest.raises(TrainingError, match=message):
        trained(monkeypatch, *overrides, *TUNE, "training.tokens=20K", "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_run_cannot_extend_itself(parent, monkeypatch):
    with pytest.raises(TrainingError, match=r"parent\.run"):
        trained(monkeypatch, f"parent.run={parent}", *LONGER, "--run-dir", parent)


def test_extension_of_padded_vocabulary_keeps_its_rows(parent, tmp_path, monkeypatch):
    """The embedding has 270 rows and the tokenizer 258 ids."""
    whole = Run.open(parent).load()
    model = Transformer(whole.settings.model, 270, 24).initialize(3)
    extra = {
        "vocab_size": 270,
        "data": about(parent)["data"],
        "data_hash": about(parent)["data_hash"],
    }
    padded = Run.create(
        tmp_path / "padded", whole.settings, whole.tokenizer, ["test"], extra
    ).folder
    save_weights(padded, 12, model, state={"tokens": 2304})
    assert Run.open(padded).load().model.vocab_size == 270
    folder = tmp_path / "longer"
    for _ in range(2):  # the second call resumes it
        assert trained(monkeypatch, f"parent.run={padded}", *LONGER, "--run-dir", folder) == 0
    assert about(folder)["vocab_size"] == 270 and Run.open(folder).load().model.vocab_size == 270
    with pytest.raises(TrainingError, match=r"258 ids .* 250 rows"):
        Run.create(
            tmp_path / "small", whole.settings, whole.tokenizer, ["test"], {"vocab_size": 250}
        )


def test_parameter_free_scheme_change_skips_comparison(parent, tmp_path, monkeypatch):
    folder = tmp_path / "none"
    overrides = ["model.position.name=none", *TUNE]
    assert trained(monkeypatch, f"parent.run={parent}", *overrides, "--run-dir", folder) == 0
    found = about(folder)["step0"]
    assert found["parent_under_method"] is None and "trained with 'rope'" in found["not_compared"]
    assert "not compared with the parent" in describe_comparison(found)
    assert same(weights(folder, 0), weights(parent))
    # NoPE is RoPE with its rotations dropped, which a test-time override can set.
    dropped = Run.open(parent).load(["model.position.scaling={name: drop}"]).model
    score = step0_score(
        monitor_targets, load_prepared(folder), Run(folder).settings, torch.device("cpu")
    )
    assert score(dropped).mean() == pytest.approx(found["nll"], abs=1e-5)


def test_learned_tables_require_an_extension_method(parent, tmp_path, monkeypatch):
    parent_run = tmp_path / "learned"
    child = tmp_path / "child"
    own = Run(parent).settings
    tree = own.model_dump(mode="json")
    tree["model"]["position"] = {"name": "learned"}
    file = tmp_path / "learned.yaml"
    file.write_text(train_yaml(tree))
    assert trained(monkeypatch, file, "--run-dir", parent_run) == 0
    with pytest.raises(TrainingError, match="positions this scheme has"):
        trained(
            monkeypatch, f"parent.run={parent_run}", "train_length=48", *TUNE, "--run-dir", child
        )
    overrides = ["train_length=48", "model.position.extend=interpolate", *TUNE]
    assert trained(monkeypatch, f"parent.run={parent_run}", *overrides, "--run-dir", child) == 0
    found = about(child)["step0"]
    position = Run(child).settings.model.position
    assert position.max_length == 24 and position.extend == "interpolate"
    assert found["largest_difference"] == 0 and found["parent_as_trained"] is None
    assert same(weights(child, 0), weights(parent_run))
    assert np.isfinite(found["nll"])


def train_yaml(tree: dict) -> str:
    return json.dumps(tree)
