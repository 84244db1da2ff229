"""Run directories: names, creation, resume, lock and loading."""

import json
import multiprocessing
import os
import subprocess
import time

import pytest
import torch

from data.files import write_json
from data.tokenizers import ByteTokenizer
from errors import TrainingError
from run_directory import run as module
from run_directory.checkpoints import save_weights
from run_directory.position_overrides import make_model
from run_directory.run import MANIFEST, Run, is_run, locked_run, model_hash
from run_directory.run_names import run_folder
from run_directory.run_settings import RunSettings
from run_directory.weights import weights_of
from settings.load import apply_overrides, identity, load_settings
from tests.files import ROOT

WORDS = [
    "train_length=32",
    "model={dim: 24, layers: 2, heads: 2}",
    "data.tokenizer.name=bytes",
    "training={tokens: 3000, batch_size: 3}",
    "training.validation.targets=8",
]
COMMAND = ["train.py", "configs/x.yaml"]
FACTS = {"data": "prepared/x", "data_hash": "d" * 8}


@pytest.fixture
def settings():
    return load_settings(RunSettings, WORDS)


@pytest.fixture
def run(tmp_path, settings):
    return Run.create(tmp_path / "runs" / "x", settings, ByteTokenizer(), COMMAND, FACTS).folder


def resume(run, settings, tokenizer=None, facts=FACTS):
    return Run(run).resume(settings, tokenizer or ByteTokenizer(), COMMAND, facts)


def fill(run, settings, step=4, dtype=torch.float32):
    model = make_model(settings, ByteTokenizer().vocab_size).initialize(1).to(dtype)
    save_weights(run, step, model)
    return model


def same_weights(a, b):
    ours = weights_of(a)
    return all(ours[name].equal(weight) for name, weight in weights_of(b).items())


def about(run):
    return json.loads((run / MANIFEST).read_text())


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


TINY, ALIBI = (str(ROOT / "configs" / file) for file in ("tiny.yaml", "position/alibi.yaml"))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([TINY], "tiny-rope"),
        ([TINY, ALIBI], "tiny-alibi"),
        (["seed=3", ALIBI, TINY, "training.optimizer.name=muon"], "alibi"),
        ([TINY, "model.position.scaling={name: yarn, factor: 4}"], "tiny-rope-yarn"),
        (["model.position.name=none"], "default-none"),
    ],
)
def test_run_name_has_file_choices_and_hash(tmp_path, overrides, name):
    settings = load_settings(RunSettings, overrides)
    assert run_folder(settings, overrides, tmp_path) == tmp_path / f"{name}-{identity(settings)}"


def test_new_run_writes_manifest(run, settings):
    assert Run(run).settings == settings
    manifest = about(run)
    assert manifest["identity"] == identity(settings)
    assert manifest["vocab_size"] == 258
    assert manifest["tokenizer_hash"] == ByteTokenizer.hash
    assert manifest["data_hash"] == "d" * 8
    (attempt,) = manifest["attempts"]
    assert attempt["command"] == COMMAND
    assert attempt["versions"]["torch"] == torch.__version__
    assert attempt["machine"]["cores"] == os.cpu_count()
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert attempt["commit"] == (commit or None)


def test_folders_that_cannot_become_a_run(run, settings, tmp_path):
    def create(folder, **facts):
        Run.create(folder, settings, ByteTokenizer(), COMMAND, facts)

    with pytest.raises(TrainingError, match=r"is already a run.*--restart"):
        create(run)
    with pytest.raises(TrainingError, match=r"258 ids.* 250 rows"):
        create(tmp_path / "small", vocab_size=250)
    fill(run, settings)
    (run / MANIFEST).unlink()
    before = (run / "settings.yaml").read_text()
    with pytest.raises(TrainingError, match=r"manifest.json.*--restart"):
        create(run)
    assert (run / "settings.yaml").read_text() == before
    half = tmp_path / "half"  # its creation was interrupted
    (half / "tokenizer").mkdir(parents=True)
    (half / "settings.yaml").write_text("half: ")
    assert not is_run(half)
    create(half)
    assert Run(half).settings == settings


def test_resume_records_permitted_changes_and_rejects_others(run, settings):
    assert resume(run, settings) == []
    free = apply_overrides(settings, ["training.log_interval=3", "training.samples.prompts=[a]"])
    changes = ["training.log_interval: 10 → 3", "training.samples.prompts: null → ['a']"]
    assert resume(run, free) == changes
    assert Run(run).settings == free
    assert [attempt["changed_settings"] for attempt in about(run)["attempts"]] == [[], [], changes]
    words = ["seed=5", "model.position.name=alibi", "training.log_interval=7"]
    with pytest.raises(TrainingError) as error:
        resume(run, apply_overrides(settings, words))
    text = str(error.value)
    for part in ("seed: 0 → 5", "model.position: rope(", "→ alibi", "--restart", f"--fork {run}"):
        assert part in text
    assert "log_interval" not in text
    assert Run(run).settings == free
    assert len(about(run)["attempts"]) == 3  # nothing has changed
    resume(run, free, facts={"data": "moved"})
    assert about(run)["data"] == "moved"


class OtherTokenizer(ByteTokenizer):
    hash = "0" * 64


def test_resume_rejects_other_data_or_tokenizer(run, settings):
    with pytest.raises(TrainingError, match="tokenizer has changed"):
        resume(run, settings, OtherTokenizer())
    with pytest.raises(TrainingError, match=r"prepared text has changed .*dddddddd, now eeee"):
        resume(run, settings, facts={"data_hash": "eeee"})


def test_run_lock_is_exclusive_and_released_on_exit(tmp_path):
    context = multiprocessing.get_context("fork")
    held = context.Event()

    def hold():
        with locked_run(tmp_path):
            held.set()
            time.sleep(60)

    child = context.Process(target=hold)
    child.start()
    assert held.wait(60)
    holder = f"trained by process {child.pid}"
    with pytest.raises(TrainingError, match=holder), locked_run(tmp_path):
        pass
    child.kill()
    child.join()
    with locked_run(tmp_path):
        pass


def test_load_restores_the_model_in_its_dtype(run, settings):
    model = fill(run, settings)
    loaded = Run.open(run).load()
    assert (loaded.step, loaded.folder, loaded.settings) == (4, run, settings)
    assert len(loaded.checkpoint_hash) == 64
    assert loaded.tokenizer.hash == ByteTokenizer.hash
    assert not loaded.model.training
    assert same_weights(loaded.model, model)
    assert Run.open(run).load(dtype=torch.float64).model.embed.weight.dtype == torch.float64
    double = fill(run, settings, step=5, dtype=torch.float64)
    assert same_weights(Run.open(run).load().model, double)  # stored so, kept so


def test_load_accepts_position_overrides_only(run, settings):
    fill(run, settings)
    stretched = Run.open(run).load(["model.position.scaling={name: linear, factor: 3}"])
    assert stretched.settings.model.position.scaling.factor == 3
    with pytest.raises(TrainingError, match="train_length cannot be changed after training"):
        Run.open(run).load(["train_length=64"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("theta: 10000.0", "theta: 20000.0"),
        ("train_length: 32", "train_length: 16"),
        ("original_length: null", "original_length: 16"),
        ("stages: []", "stages: [{length: 32}]"),
    ],
)
def test_edited_model_settings_are_rejected(run, settings, old, new):
    fill(run, settings)
    file = run / "settings.yaml"
    text = file.read_text()
    edit(file, old, new)
    with pytest.raises(TrainingError, match=r"settings.yaml: model, train_length"):
        Run.open(run).load()
    file.write_text("# a comment changes no value\n" + text)
    assert Run.open(run).load().settings == settings


@pytest.mark.parametrize("write", [0, 1, 2])
def test_interrupted_change_of_settings_leaves_a_run(run, settings, monkeypatch, write):
    """The manifest, the settings and the manifest again are written; each write may be the last."""
    edit(run / "settings.yaml", "  norm_eps: 1.0e-05\n", "")
    hashes = [model_hash((run / "settings.yaml").read_text())]
    write_json(run / MANIFEST, about(run) | {"model_hash": hashes})
    free = apply_overrides(settings, ["training.log_interval=3"])
    calls = []

    def stopping(function):
        def wrapped(*arguments, **options):
            if len(calls) == write:
                raise KeyboardInterrupt
            calls.append(function)
            return function(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for name in ("write_json", "write_text"):
            patch.setattr(module, name, stopping(getattr(module, name)))
        resume(run, free)
    assert Run(run).settings in (settings, free)
    resume(run, free)
    assert Run(run).settings == free
    assert len(about(run)["model_hash"]) == 1


def test_folders_that_cannot_be_loaded(run, settings, tmp_path):
    def refused(folder, message):
        with pytest.raises(TrainingError, match=message):
            Run.open(folder).load()

    refused(run, "no checkpoint yet")
    refused(run.with_name("y"), "no such run directory")
    refused(tmp_path, "not a run directory: it has no manifest.json")
    fill(run, settings)
    manifest = about(run)
    for change, message in (
        ({"tokenizer_hash": "f" * 64}, "not the tokenizer of this run"),
        ({"vocab_size": "9"}, "manifest.json: vocab_size "),
    ):
        write_json(run / MANIFEST, manifest | change)
        refused(run, message)
    (run / MANIFEST).write_text("{")
    refused(run, "manifest.json: not readable as JSON")
