"""Runs that start from another: forks continue it, extension runs fine-tune its weights."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from data.preparation import preparation
from errors import TrainingError
from evaluation.monitor import monitor_targets
from run_directory.checkpoints import find_checkpoint, folder_of, save_weights
from run_directory.parent_run import read_run_settings
from run_directory.position_overrides import make_model
from run_directory.run import Run
from settings.load import identity
from tests.files import ROOT
from tests.training.conftest import REFUSED
from tests.training.tiny import cut, files_of, lines, same, trained, weights
from training import dry_run

SHORT = ["training.lr_schedule.warmup=3", "training.lr_schedule.decay=4"]
STEM = [
    ROOT / "configs/wsd/stem.yaml",
    *SHORT,
    "training.tokens=3072",  # 16 steps
    "training.checkpoint={interval: 4, keep: 1, keep_interval: 4}",
    "training.samples.prompts=[]",
]
DECAY = [ROOT / "configs/wsd/decay.yaml", *SHORT, "training.tokens=2304"]  # the last 4 of 12 steps
TUNE = ["training.tokens=960", "training.batch_size=4", "training.validation.interval=null"]
LONGER = ["train_length=48", "model.position.scaling.name=yarn", *TUNE]


@pytest.fixture(scope="module")
def folders(settings_of_runs, whole, tmp_path_factory):
    """A stem at a constant rate, and a parent with an extension run that kept its step 0."""
    root = tmp_path_factory.mktemp("runs")
    assert trained(*settings_of_runs, *STEM, "--run-dir", root / "stem") == 0
    shutil.copytree(whole, root / "parent")
    words = [f"parent.run={root / 'parent'}", *LONGER, "training.checkpoint={interval: 2, keep: 9}"]
    assert trained(*words, "--run-dir", root / "yarn") == 0
    return root


@pytest.fixture
def stem(folders) -> Path:
    return folders / "stem"


@pytest.fixture
def parent(folders) -> Path:
    return folders / "parent"


@pytest.fixture
def yarn(folders) -> Path:
    return folders / "yarn"


# Forks


def test_decay_fork_equals_run_with_same_budget(overrides, stem, tmp_path, capsys, monkeypatch):
    straight = tmp_path / "straight"
    decay = tmp_path / "decay"
    fork = [*DECAY, "parent.checkpoint=8", "--fork", stem, "--run-dir", decay]
    assert trained(*overrides, *STEM, *DECAY, "--run-dir", straight) == 0
    assert trained(*fork) == 0
    assert "changed training.tokens: 3072 → 2304" in capsys.readouterr().err
    assert lines(decay) == [line for line in lines(straight) if line["step"] > 8]
    assert files_of(decay, 12) == files_of(straight, 12)
    assert not same(weights(stem, 12), weights(decay, 12))  # the stem at that step is another model
    (own,) = Run(decay).manifest["lineage"]
    assert (own["run"], own["step"], own["fork"]) == (str(stem), 8, True)
    for run in (stem, decay):
        assert find_checkpoint(run, step=8).hash == own["checkpoint_hash"]
    assert own["changed"] == ["training.tokens: 3072 → 2304"]

    # It resumes as any run, with the stem gone; the run has its text.
    cut(decay, 8)
    checked = []
    monkeypatch.setattr(dry_run, "is_prepared", lambda data: False)
    monkeypatch.setattr(dry_run, "check_texts", checked.append)
    away = stem.rename(stem.with_name("away"))
    try:
        assert trained(*fork, "--dry-run") == 0
        assert not checked
        assert trained(*fork) == 0
    finally:
        away.rename(stem)
    assert files_of(decay, 12) == files_of(straight, 12)
    assert trained(*fork, "--dry-run") == 0
    assert len(checked) == 1


def test_fork_settings_override_those_of_the_checkpoint(stem, tmp_path):
    """A fork that changes nothing is the run itself."""
    start = ["parent.checkpoint=12", "--fork", stem, "--run-dir"]
    assert trained("training.optimizer.weight_decay=0.7", *start, tmp_path / "fork") == 0
    assert trained(*start, tmp_path / "unchanged") == 0
    assert not same(weights(tmp_path / "fork"), weights(stem))
    assert same(weights(tmp_path / "unchanged"), weights(stem))


def test_fork_with_another_precision(stem, tmp_path):
    start = ["parent.checkpoint=12", "--fork", stem, "--run-dir", tmp_path / "fork"]
    assert trained("training.precision=float64", *start) == 0
    moments = weights(tmp_path / "fork", kind="optimizer")
    assert {x.dtype for name, x in moments.items() if "exp_avg" in name} == {torch.float64}
    expected = weights(stem)
    for name, weight in weights(tmp_path / "fork").items():
        torch.testing.assert_close(weight.float(), expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    REFUSED["forks"],
)
def test_invalid_forks_are_rejected_without_files(stem, tmp_path, overrides, message):
    with pytest.raises(TrainingError, match=f"(?s){message}"):
        trained(*overrides, "--fork", stem, "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_fork_of_a_run_without_an_optimizer(stem, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(stem, bare)
    shutil.rmtree(bare / "checkpoints")
    save_weights(bare, 16, Run(stem).load(checkpoint=16).model)
    with pytest.raises(TrainingError, match="only weights"):
        trained("training.tokens=4000", "--fork", bare, "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_dry_run_shows_what_is_left_after_the_fork(stem, capsys):
    assert trained(*DECAY, "--fork", stem, "parent.checkpoint=8", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "4 are left after step 8" in out
    assert re.search(r"fork of +.*, step 8 ", out)


# Extension runs


def test_extension_starts_from_the_parent_under_other_settings(parent, yarn):
    old = Run(parent).settings
    new = Run(yarn).settings
    assert (new.train_length, new.original_length, new.seed) == (48, 24, 1)
    assert new.data == old.data
    assert new.model.position.scaling.stretch(48, new.original_length) == 2
    assert new.parent.hash == find_checkpoint(parent).hash
    assert new.parent.checkpoint == 12
    assert same(weights(yarn, 0), weights(parent))
    assert not same(weights(yarn), weights(parent))
    # Its first validation is that of the parent's weights under the same method.
    first = lines(yarn, "validation")[0]
    model = Run(parent).load(["model.position.scaling.name=yarn"]).model
    targets = monitor_targets(Run(yarn).open_data(), [48, 96, 192], 8, 4, seed=1)
    expected = {str(length): nll for length, (nll, _) in targets.measure(model).items()}
    assert first["step"] == 0
    assert first["nll"] == pytest.approx(expected, abs=1e-6)


def test_lineage_of_nested_extensions(parent, yarn, tmp_path):
    words = [f"parent.run={yarn}", "parent.checkpoint=0", "train_length=96"]
    assert trained(*words, "training.batch_size=2", "--run-dir", tmp_path / "second") == 0
    second = Run(tmp_path / "second")
    near, far = second.manifest["lineage"]
    assert (near["run"], near["step"], near["train_length"]) == (str(yarn), 0, 48)
    assert (far["run"], far["checkpoint_hash"]) == (str(parent), find_checkpoint(parent).hash)
    assert "train_length: 24 → 48" in far["changed"]
    assert near["data"] == far["data"] == Run(parent).manifest["data"]
    assert same(weights(second.folder, 0), weights(parent))
    assert second.settings.original_length == 24


def test_extension_resumes_without_parent(parent, yarn, tmp_path):
    """... once it has begun: it goes on, ends as if the parent were there, and is evaluated."""
    again = tmp_path / "cut"
    shutil.copytree(yarn, again)
    cut(again, 2)
    words = [f"parent.run={parent}", "training.checkpoint={interval: 2, keep: 9}"]
    away = parent.rename(parent.with_name("away"))
    try:
        assert trained(*words, *LONGER, "--run-dir", again) == 0
        with pytest.raises(
            TrainingError, match=r"cannot change on resume.*\n.*model.position.scaling"
        ):
            trained(*words, *TUNE, "train_length=48", "--run-dir", again)
        with pytest.raises(TrainingError, match="no such run directory"):
            trained(*words, *LONGER, "--run-dir", tmp_path / "new")
    finally:
        away.rename(parent)
    assert files_of(again, 5) == files_of(yarn, 5)
    assert Run(again).manifest["lineage"] == Run(yarn).manifest["lineage"]
    assert Run(again).load().settings.original_length == 24


def test_extension_resumes_after_its_parent_went_on(parent, tmp_path):
    """The parent saves a newer checkpoint, and removes the one that the run started from."""
    going = tmp_path / "going"
    shutil.copytree(parent, going)
    cut(going, 9)
    words = [f"parent.run={going}", *LONGER, "--run-dir", tmp_path / "child"]
    assert trained(*words) == 0
    hash_before = Run(tmp_path / "child").settings.parent.hash
    shutil.copytree(folder_of(parent, 12), folder_of(going, 12))
    for _ in range(2):
        cut(tmp_path / "child", 3)
        assert trained(*words) == 0
        assert Run(tmp_path / "child").settings.parent.hash == hash_before
        shutil.rmtree(folder_of(going, 9), ignore_errors=True)
    assert trained(*words, "--restart") == 0
    assert Run(tmp_path / "child").settings.parent.checkpoint == 12


def test_identity_depends_on_parent_weights_not_path(parent, tmp_path):
    other = tmp_path / "elsewhere"
    shutil.copytree(parent, other)

    def settings(run, *words):
        return read_run_settings([f"parent.run={run}", *LONGER, *words])[0]

    first = settings(parent)
    assert identity(settings(other)) == identity(first)
    shutil.rmtree(other / "checkpoints")
    model = Run(parent).load().model
    with torch.no_grad():
        next(model.parameters()).add_(1)
    save_weights(other, 12, model)
    assert identity(settings(other)) != identity(first)
    with pytest.raises(TrainingError, match=r"parent.hash is "):
        settings(other, f"parent.hash={first.parent.hash}")


@pytest.mark.parametrize(
    ("words", "message"),
    REFUSED["extensions"],
)
def test_invalid_extensions_are_rejected_without_files(
    parent, tmp_path, monkeypatch, words, message
):
    real = preparation.prepare

    # the text of another tokenizer, without the minute it takes to make
    def prepare(data, console):
        prepared = real(Run(parent).settings.data, console)
        if data.tokenizer.name == "sentencepiece":
            monkeypatch.setattr(type(prepared.tokenizer), "hash", "0" * 64)
        return prepared

    monkeypatch.setattr(preparation, "prepare", prepare)
    with pytest.raises(TrainingError, match=message):
        words = [f"parent.run={parent}", *words, *TUNE, "training.tokens=20K"]
        trained(*words, "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_extension_of_padded_vocabulary_keeps_its_rows(parent, tmp_path):
    """The embedding has 270 rows and the tokenizer 258 ids."""
    own = Run(parent)
    facts = {"vocab_size": 270} | {key: own.manifest[key] for key in ("data", "data_hash")}
    padded = Run.create(tmp_path / "padded", own.settings, own.tokenizer, ["test"], facts)
    model = make_model(own.settings, 270).initialize(3)
    save_weights(padded.folder, 12, model, state={"tokens": 2304})
    folder = tmp_path / "longer"
    for _ in range(2):  # the second call resumes it
        assert trained(f"parent.run={padded.folder}", *LONGER, "--run-dir", folder) == 0
    assert Run(folder).vocab_size == 270
    assert Run(folder).load().model.vocab_size == 270


def test_schemes_with_equal_parameters_and_learned_tables(parent, settings_of_runs, tmp_path):
    """NoPE is RoPE with its rotations dropped, which a test-time override can set; a learned table
    requires an extension method."""
    none = tmp_path / "none"
    words = [f"parent.run={parent}", "model.position.name=none", *TUNE, "--run-dir", none]
    assert trained(*words) == 0
    dropped = Run(parent).load(["model.position.scaling={name: drop}"]).model
    targets = monitor_targets(Run(none).open_data(), [24, 48, 96], 8, 4, seed=1)
    first = lines(none, "validation")[0]["nll"]["24"]
    assert targets.measure(dropped)[24][0] == pytest.approx(first, abs=1e-5)

    learned = tmp_path / "learned"
    child = tmp_path / "child"
    limited = ["model.position.name=learned", "training.validation.multiples=[1]"]
    assert trained(*settings_of_runs, *limited, "--run-dir", learned) == 0
    longer = [f"parent.run={learned}", "train_length=48", *TUNE, "training.checkpoint.keep=9"]
    longer += ["--run-dir", child]
    with pytest.raises(TrainingError, match="needs 48 positions"):
        trained(*longer)
    assert trained("model.position.extend=interpolate", *longer) == 0
    assert Run(child).settings.model.position.max_length == 24
    assert same(weights(child, 0), weights(learned))
