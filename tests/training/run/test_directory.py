"""Run directories: creation, resume, lock and loading."""

import json
import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from data.files import write_json
from data.tokenizers import ByteTokenizer
from errors import TrainingError
from model import ModelError, TokenPositions, Transformer
from run_directory import run as directory
from run_directory.run import (
    MANIFEST,
    Run,
    is_run,
    locked_run,
    model_hash,
)
from run_directory.run_names import run_folder
from run_directory.run_settings import RunSettings
from run_directory.weights import save_weights
from settings.load import apply_overrides, identity, load_settings
from tests.training.states import save_checkpoint
from training.optim.optimizer import make_optimizer

WORDS = [
    "train_length=32",
    "model={dim: 24, layers: 2, heads: 2}",
    "data.tokenizer.name=bytes",
    "training={tokens: 3000, batch_size: 3}",
    "training.validation.targets=8",
]
ROOT = Path(__file__).resolve().parents[3]
COMMAND = ["train.py", "configs/x.yaml"]
EXTRA = {"data": "prepared/x", "data_hash": "d" * 8}


@pytest.fixture
def settings():
    return load_settings(RunSettings, WORDS)


@pytest.fixture
def run(tmp_path, settings):
    return Run.create(tmp_path / "runs" / "x", settings, ByteTokenizer(), COMMAND, EXTRA).folder


def fill(run, settings, step=4, seed=1):
    model = Transformer(
        settings.model, ByteTokenizer().vocab_size, settings.train_length
    ).initialize(seed)
    save_checkpoint(
        run, step, model, make_optimizer(model, settings.training.optimizer), {"step": step}
    )
    return model


def same_weights(one, other):
    """Exact, unlike logits, whose rounding may depend on where in memory the weights lie."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def logits(model):
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        return model(tokens, TokenPositions.plain(5))


def test_run_name_has_file_overrides_and_hash(tmp_path):
    tiny, alibi = (str(ROOT / "configs" / file) for file in ("tiny.yaml", "position/alibi.yaml"))
    for overrides, name in (
        ([tiny], "tiny-rope"),
        ([tiny, alibi], "tiny-alibi"),
        ([alibi, tiny], "alibi"),
        (["seed=3", tiny, alibi, "training.optimizer.name=muon"], "tiny-alibi-muon"),
        (
            [tiny, "model.position.scaling.name=yarn", "model.position.scaling.factor=4"],
            "tiny-rope-yarn",
        ),
        ([tiny, "model.position.theta=500", "training.on_nonfinite.name=skip"], "tiny-rope"),
        (["model.position.name=none"], "default-none"),
    ):
        settings = load_settings(RunSettings, overrides)
        folder = run_folder(settings, overrides, tmp_path)
        assert folder == tmp_path / f"{name}-{identity(settings)}"
        # A run that an earlier version named otherwise is found by its hash.
        older = tmp_path / f"{name.partition('-')[0]}-{identity(settings)}"
        older.mkdir(exist_ok=True)
        (older / "manifest.json").write_text("{}")
        assert run_folder(settings, overrides, tmp_path) == older


def test_new_run_writes_manifest(run, settings):
    assert Run(run).settings == settings
    about = json.loads((run / "manifest.json").read_text())
    assert about["identity"] == identity(settings) and about["vocab_size"] == 258
    assert about["tokenizer_hash"] == ByteTokenizer.hash and about["data_hash"] == "dddddddd"
    (attempt,) = about["attempts"]
    assert attempt["command"] == COMMAND and attempt["versions"]["torch"] == torch.__version__
    assert attempt["machine"]["cores"] == os.cpu_count()
    total = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    assert attempt["machine"]["memory"] == pytest.approx(int(total.split()[1]) * 1024, rel=0.01)
    assert (
        attempt["machine"]["processor"]
        and len(attempt["machine"]["gpus"]) == torch.cuda.device_count()
    )
    assert attempt["versions"]["cuda"] == torch.version.cuda and attempt["parallel"] is None
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    assert attempt["commit"] == (commit or None)
    with pytest.raises(TrainingError, match="is already a run"):
        Run.create(run, settings, ByteTokenizer(), COMMAND)


def test_incomplete_run_is_recreated(tmp_path, settings, monkeypatch):
    folder = tmp_path / "x"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "settings.yaml").write_text("half: ")
    assert not is_run(folder)
    Run.create(folder, settings, ByteTokenizer(), COMMAND)
    assert is_run(folder) and Run(folder).settings == settings


def test_resume_records_mutable_settings_and_rejects_others(run, settings):
    assert Run(run).resume(settings, ByteTokenizer(), COMMAND, EXTRA) == []
    free = apply_overrides(settings, ["training.log_interval=3", "training.samples.prompts=[a]"])
    assert Run(run).resume(free, ByteTokenizer(), COMMAND, EXTRA) == [
        "training.log_interval: 10 → 3",
        "training.samples.prompts: null → ['a']",
    ]
    assert Run(run).settings == free
    attempts = json.loads((run / "manifest.json").read_text())["attempts"]
    assert [len(attempt["changed_settings"]) for attempt in attempts] == [0, 0, 2]
    other = apply_overrides(
        settings, ["seed=5", "model.position.name=alibi", "training.log_interval=7"]
    )
    with pytest.raises(TrainingError) as error:
        Run(run).resume(other, ByteTokenizer(), COMMAND, EXTRA)
    text = str(error.value)
    assert (
        "seed: 0 → 5" in text
        and "model.position: rope(" in text
        and "→ alibi" in text
        and "--restart" in text
    )
    assert "log_interval" not in text
    assert Run(run).settings == free  # a refusal changes nothing
    assert len(json.loads((run / "manifest.json").read_text())["attempts"]) == 3


class OtherTokenizer(ByteTokenizer):
    hash = "0" * 64


def test_resume_rejects_other_data_or_tokenizer(run, settings):
    with pytest.raises(TrainingError, match="tokenizer has changed"):
        Run(run).resume(settings, OtherTokenizer(), COMMAND, EXTRA)
    with pytest.raises(TrainingError, match=r"prepared text has changed .*dddddddd, now eeee"):
        Run(run).resume(settings, ByteTokenizer(), COMMAND, {"data_hash": "eeee"})
    other = apply_overrides(
        settings, ["data.valid_fraction=0.5"]
    )  # the setting is named, not what follows from it
    with pytest.raises(TrainingError, match=r"data.valid_fraction: \S+ → 0.5"):
        Run(run).resume(other, ByteTokenizer(), COMMAND, {"data_hash": "eeee"})


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
    with pytest.raises(TrainingError, match="trained by process"), locked_run(tmp_path):
        pass
    child.kill()
    child.join()
    with locked_run(tmp_path):
        (tmp_path / ".lock").unlink()
        with pytest.raises(TrainingError, match="trained by"), locked_run(tmp_path):
            pass


def test_checkpoints_without_manifest_are_rejected(run, settings):
    fill(run, settings)
    (run / "manifest.json").unlink()
    before = (run / "settings.yaml").read_text()
    with pytest.raises(TrainingError, match=r"manifest.json.*--restart"):
        Run.create(run, apply_overrides(settings, ["seed=5"]), ByteTokenizer(), COMMAND)
    assert (run / "settings.yaml").read_text() == before


def test_load_restores_model(run, settings):
    model = fill(run, settings)
    found = Run.open(run).load()
    assert (found.step, found.folder, found.settings) == (4, run, settings)
    assert len(found.checkpoint_hash) == 64 and found.tokenizer.hash == ByteTokenizer.hash
    assert not found.model.training
    assert same_weights(found.model, model)
    assert next(Run.open(run).load(dtype=torch.float64).model.parameters()).dtype == torch.float64


def test_load_from_weights_only(run, settings):
    model = Transformer(settings.model, 258, settings.train_length).initialize(3).double()
    save_weights(run, 0, model)
    found = Run.open(run).load()
    assert found.step == 0 and same_weights(found.model, model)
    assert logits(found.model).dtype == torch.float64  # stored so, kept so


def test_load_accepts_position_overrides_only(run, settings):
    model = fill(run, settings)
    same = Run.open(run).load(["model.position.scaling={name: linear, factor: 1}"])
    assert same_weights(same.model, model)
    other = Run.open(run).load(
        ["model.position.scaling.name=linear", "model.position.scaling.factor=3"]
    )
    assert other.settings.model.position.scaling.factor == 3
    assert not torch.allclose(logits(other.model), logits(model))
    with pytest.raises(ModelError, match=r"trained with 'rope', cannot become 'alibi'"):
        Run.open(run).load(["model.position.name=alibi"])
    with pytest.raises(ModelError, match=r"model.dim is part of the trained weights"):
        Run.open(run).load(["model.dim=48"])
    with pytest.raises(TrainingError, match="train_length cannot be changed after training"):
        Run.open(run).load(["train_length=64"])
    with pytest.raises(TrainingError, match=r"did you mean model.position.scaling"):
        Run.open(run).load(["model.position.scalin.name=yarn"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("theta: 10000.0", "theta: 20000.0"),
        ("norm_eps: 1.0e-05", "norm_eps: 1.0e-04"),
        ("train_length: 32", "train_length: 16"),
        ("original_length: null", "original_length: 16"),
    ],
)
def test_edited_model_settings_are_rejected(run, settings, before, after):
    fill(run, settings)
    file = run / "settings.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    with pytest.raises(TrainingError, match=r"settings.yaml: model, train_length"):
        Run.open(run).load()
    file.write_text("# a comment changes no value\n" + text)
    assert Run.open(run).load().settings == settings


def test_model_hash_follows_permitted_changes(run, settings, capsys):
    model = fill(run, settings)
    free = apply_overrides(settings, ["training.log_interval=3"])
    text = (run / "settings.yaml").read_text()
    Run(run).resume(free, ByteTokenizer(), COMMAND, EXTRA)
    assert len(Run(run).manifest["model_hash"]) == 1 and Run.open(run).load().settings == free
    # A run of an earlier version: without the hash, and without a field that was added since.
    shorter = text.replace("  norm_eps: 1.0e-05\n", "")
    assert shorter != text
    (run / "settings.yaml").write_text(shorter)
    about = Run(run).manifest
    del about["model_hash"]
    write_json(run / MANIFEST, about)
    capsys.readouterr()
    assert same_weights(Run.open(run).load().model, model)
    assert "not verified" in capsys.readouterr().err
    Run(run).resume(free, ByteTokenizer(), COMMAND, EXTRA)
    assert Run.open(run).load().settings == free
    assert "not verified" not in capsys.readouterr().err


@pytest.mark.parametrize("write", [0, 1, 2])
def test_interrupted_change_of_settings_leaves_a_run(run, settings, monkeypatch, write):
    """The manifest, the settings and the manifest again are written; each write may be the last."""
    (run / "settings.yaml").write_text(
        (run / "settings.yaml").read_text().replace("  norm_eps: 1.0e-05\n", "")
    )
    about = Run(run).manifest
    write_json(
        run / MANIFEST, about | {"model_hash": [model_hash((run / "settings.yaml").read_text())]}
    )
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
            patch.setattr(f"run_directory.run.{name}", stopping(getattr(directory, name)))
        Run(run).resume(free, ByteTokenizer(), COMMAND, EXTRA)
    assert Run(run).settings in (settings, free)
    Run(run).resume(free, ByteTokenizer(), COMMAND, EXTRA)
    assert Run(run).settings == free and len(Run(run).manifest["model_hash"]) == 1


def test_load_errors(run, settings, tmp_path):
    with pytest.raises(TrainingError, match="no checkpoint yet"):
        Run.open(run).load()
    with pytest.raises(TrainingError, match=r"no such run directory; .* holds x"):
        Run.open(run.with_name("y")).load()
    with pytest.raises(TrainingError, match=r"not a run directory: it has no manifest.json"):
        Run.open(tmp_path).load()
    fill(run, settings)
    about = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(about | {"tokenizer_hash": "f" * 64}))
    with pytest.raises(TrainingError, match="not the tokenizer of this run"):
        Run.open(run).load()
    (run / "manifest.json").write_text("{")
    with pytest.raises(TrainingError, match=r"manifest.json: not readable as JSON"):
        Run.open(run).load()


def test_resume_rejects_other_validation_data(run, settings):
    Run(run).resume(settings, ByteTokenizer(), COMMAND, EXTRA)  # of a run from before it was noted
    about = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(about | {"valid_hash": "v" * 64}))
    Run(run).resume(settings, ByteTokenizer(), COMMAND, {**EXTRA, "valid_hash": "v" * 64})
    with pytest.raises(TrainingError, match="held-out text has changed"):
        Run(run).resume(settings, ByteTokenizer(), COMMAND, {**EXTRA, "valid_hash": "w" * 64})


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "9"}, "vocab_size"),
        ({"mixture": 3}, "mixture"),
    ],
)
def test_missing_manifest_keys_are_named(tmp_path, harm, named):
    write_json(tmp_path / MANIFEST, {"vocab_size": 9, "tokenizer_hash": "a", "data": None} | harm)
    with pytest.raises(TrainingError, match=rf"manifest.json: {named} "):
        _ = Run(tmp_path).vocab_size
