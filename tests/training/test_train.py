"""train.py end to end: parallel equality, resume, signals, faults."""

import json
import math
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train
from data import DataError, store
from data.files import read_json, sha256_of
from errors import INTERRUPTED, REQUEUE, EvaluationError, TrainingError
from model import ModelSettings, TokenPositions, Transformer
from run_directory.checkpoints import folder_of, steps_of
from run_directory.metrics_file import read_metrics
from run_directory.optimizer_settings import AdamWSettings
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from run_directory.training_settings import TrainingSettings
from tests.training.distributed.curves import shared
from training import validation
from training.batches import MicroBatch, StepBatch
from training.distributed.parallel import Parallel
from training.metrics import Metrics
from training.stop_requests import StopRequests
from training.train_state import TrainState

TIMING = {"attempt", "tokens_per_second", "mfu", "peak_memory_bytes", "seconds"}


def lines(folder: Path) -> list[dict]:
    """The metrics of a run without what a clock decides."""
    kept = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] != "start"]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in kept]


def weights(folder: Path) -> dict:
    last = max((folder / "checkpoints").glob("step-*"))
    return load_file(last / "model.safetensors")


def here(monkeypatch, *argv: str) -> int:
    """The same main in this process: imports are paid once."""
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    return train.main()


@pytest.fixture
def whole(overrides, tmp_path, monkeypatch) -> Path:
    """An uninterrupted run."""
    folder = tmp_path / "whole"
    assert here(monkeypatch, *overrides, "--run-dir", str(folder)) == 0
    return folder


def test_run_logs_every_step_and_validates_beyond_trained_length(whole, corpus):
    found = lines(whole)
    steps = [line["step"] for line in found if line["kind"] == "train"]
    assert steps == list(range(1, 13))
    validations = [line for line in found if line["kind"] == "validation"]
    assert [line["step"] for line in validations] == [4, 8, 12]
    assert set(validations[0]["nll"]) == {"24", "48", "96"}
    assert {(line["targets"], line["documents"]) for line in validations} == {(4 * 8, 4)}
    losses = [line["loss"] for line in found if line["kind"] == "train"]
    assert abs(losses[0] - 5.5530) < 0.06  # ln 258
    assert losses[-1] < losses[0] - 0.3
    (prompt,) = [
        s["prompt"] for line in found if line["kind"] == "samples" for s in line["samples"]
    ]
    openings = [file.read_text()[:16] for file in corpus.iterdir()]
    # whole words of a document
    assert prompt and prompt in [text[: text.rindex(" ")] for text in openings]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, REQUEUE), (signal.SIGUSR1, REQUEUE)],
)
def test_signal_saves_checkpoint_and_exits(
    overrides, whole, tmp_path, monkeypatch, capsys, number, status
):
    folder = tmp_path / "stopped"
    real = Metrics.log

    def log(self, state, *arguments, **options):
        status = real(self, state, *arguments, **options)
        if state.step == 5:
            signal.raise_signal(number)
        return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "log", log)
        slow = [*overrides, "training.checkpoint.interval=null"]
        assert here(monkeypatch, *slow, "--run-dir", str(folder)) == status
    assert f"stopped by {number.name} after step 6; saved" in capsys.readouterr().err
    assert steps_of(folder) == [6]
    assert here(monkeypatch, *overrides, "--run-dir", str(folder)) == 0
    losses = [line["loss"] for line in lines(folder) if line["kind"] == "train"]
    assert losses == [line["loss"] for line in lines(whole) if line["kind"] == "train"]


def test_two_processes_match_single_process(overrides, tmp_path, monkeypatch):
    exact = [*overrides, "training.precision=float64", "data.packing=intra_document"]
    assert here(monkeypatch, *exact, "--run-dir", str(tmp_path / "one")) == 0
    two = [*exact, "training.micro_batch_size=3", "--run-dir", str(tmp_path / "two")]
    assert shared(2, lambda: here(monkeypatch, *two)) == [0, 0]
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert manifest["attempts"][-1]["machine"]["processes"] == 2
    parallel = manifest["attempts"][-1]["parallel"]
    assert (parallel["processes"], parallel["kind"], parallel["backend"]) == (
        2,
        "MULTI_CPU",
        "gloo",
    )
    assert [rank["host"] for rank in parallel["ranks"]] == [socket.gethostname()] * 2
    assert len(manifest["data_hash"]) == len(manifest["valid_hash"]) == 64
    assert (
        manifest["exposure"] == "exposure.npz"
        and (tmp_path / "two" / manifest["exposure"]).exists()
    )
    one = lines(tmp_path / "one")
    two = lines(tmp_path / "two")
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        if a["kind"] == "train":
            assert a["data"] == b["data"] and a["targets"] == b["targets"]
            assert (
                abs(a["loss"] - b["loss"]) < 1e-10 and abs(a["grad_norm"] - b["grad_norm"]) < 1e-9
            )
        if a["kind"] == "validation":
            assert all(abs(a["nll"][length] - b["nll"][length]) < 1e-9 for length in a["nll"])


def test_sampled_positions_are_reproduced_on_resume(overrides, tmp_path, monkeypatch):
    overrides = [*overrides, "model.position.name=sinusoidal", "training.micro_batch_size=3"]
    drawn = [*overrides, "data.packing=intra_document", "data.positions.name=cape"]
    folder = tmp_path / "drawn"
    assert (
        here(
            monkeypatch,
            *overrides,
            "data.packing=intra_document",
            "--run-dir",
            str(tmp_path / "plain"),
        )
        == 0
    )
    assert here(monkeypatch, *drawn, "--run-dir", str(folder)) == 0
    logged = lines(folder)
    ours = weights(folder)
    first, plain = (
        read_metrics(tmp_path / name / "metrics.jsonl", "train")[0] for name in ("drawn", "plain")
    )
    assert first["data"] == plain["data"] and abs(first["loss"] - plain["loss"]) > 1e-6
    shutil.rmtree(folder / "checkpoints" / "step-00000012")
    assert here(monkeypatch, *drawn, "--run-dir", str(folder)) == 0
    assert lines(folder) == logged
    again = weights(folder)
    assert all(ours[name].equal(again[name]) for name in ours)


def test_non_finite_loss_stops_before_update(overrides, tmp_path, monkeypatch):
    folder = tmp_path / "broken"
    wild = [
        *overrides,
        "training.optimizer.lr=1e18",
        "training.lr_schedule.warmup=0",
        "training.checkpoint.interval=1",
    ]
    for _ in range(2):  # started again, it does not call the checkpoint good either
        with pytest.raises(
            TrainingError, match=r"step 2: .* the gradient norm nan.* there is no good checkpoint"
        ):
            here(monkeypatch, *wild, "training.grad_clip=null", "--run-dir", str(folder))
    found = read_metrics(folder / "metrics.jsonl", "train")
    assert found[-1]["step"] == 2 and found[-1]["grad_norm"] == "nan"
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000001"]
    with pytest.raises(
        TrainingError, match=r"step 1 is not saved, embed\.weight has numbers of 1e\+30"
    ):
        here(monkeypatch, *wild, "training.optimizer.lr=1e30", "--run-dir", str(tmp_path / "dead"))
    assert steps_of(tmp_path / "dead") == []


def test_checkpoint_policy_and_async_save_do_not_change_run(
    overrides, tmp_path, monkeypatch, capsys
):
    """... also under a clock that jumps by hours, to and fro, and with a mirror that cannot be
    reached."""
    overrides = [*overrides, "training.checkpoint.interval=4", "training.samples.prompts=[]"]
    plain = tmp_path / "plain"
    folder = tmp_path / "policy"
    assert here(monkeypatch, *overrides, "training.checkpoint.keep=9", "--run-dir", str(plain)) == 0
    real = time.time
    looks = iter(range(10**9))
    jumps = (0.0, 7200.0, -7200.0, 86_400.0, 3600.0)  # as many as no number of steps divides
    monkeypatch.setattr(time, "time", lambda: real() + jumps[next(looks) % len(jumps)])
    monkeypatch.setitem(sys.modules, "wandb", unreachable())
    policy = [
        "training.checkpoint={interval: 4, keep: 1, keep_interval: 8, best: 1, asynchronous: true}"
    ]
    policy.append("training.wandb.mode=online")
    assert here(monkeypatch, *overrides, *policy, "--run-dir", str(folder)) == 0
    output = capsys.readouterr().err
    assert "wandb is disabled; training continues" in output and "no route to host" in output
    assert "best at 1 × train_length: step 12, held-out NLL" in output
    assert steps_of(folder) == [8, 12] and lines(folder) == lines(plain)
    for step in (8, 12):
        files = [folder_of(run, step) for run in (plain, folder)]
        assert all(
            (files[0] / name).read_bytes() == (files[1] / name).read_bytes() for name in CHECKPOINT
        )
    rates = [
        line["tokens_per_second"]
        for line in read_metrics(folder / "metrics.jsonl")
        if "tokens_per_second" in line
    ]
    # an hour more would leave less than one
    assert rates and all(50 < rate < 1e7 for rate in rates)


CHECKPOINT = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def unreachable() -> SimpleNamespace:
    def init(**_: object) -> None:
        raise ConnectionError("no route to host")

    return SimpleNamespace(init=init)


def test_too_short_data_creates_no_run(overrides, tmp_path, monkeypatch):
    folder = tmp_path / "never"
    with pytest.raises(EvaluationError, match=r"0 of \d+ .*lower targets|longest usable length"):
        here(
            monkeypatch,
            *overrides,
            "train_length=4096",
            "training.tokens=40k",
            "--run-dir",
            str(folder),
        )
    assert not folder.exists()


def test_missing_validation_data_names_setting(overrides, tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match=r"no documents: raise data.valid_fraction"):
        here(monkeypatch, *overrides, "data.valid_fraction=0", "--run-dir", str(tmp_path / "never"))
    assert not (tmp_path / "never").exists()


def test_modified_shard_is_detected_before_training(overrides, tmp_path, monkeypatch):
    root = tmp_path / "prepared"
    folder = tmp_path / "never"
    assert (
        here(monkeypatch, *overrides, f"data.root={root}", "--run-dir", str(tmp_path / "first"))
        == 0
    )
    shard = next(root.glob("*/train/*.tokens"))
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(
        DataError,
        match=rf"{shard} does not match its recorded hash.* delete {shard.parents[1]} and prepare",
    ):
        here(monkeypatch, *overrides, f"data.root={root}", "--run-dir", str(folder))
    assert not folder.exists()


def test_ids_outside_the_vocabulary_are_reported_before_training(overrides, tmp_path, monkeypatch):
    """A store whose hashes match, with an id that the tokenizer does not have."""
    words = [*overrides, f"data.root={tmp_path / 'prepared'}"]
    assert here(monkeypatch, *words, "--run-dir", str(tmp_path / "first")) == 0
    shard = next((tmp_path / "prepared").glob("*/train/*.tokens"))
    ids = np.fromfile(shard, dtype="<u2")
    ids[50] = 300
    ids.tofile(shard)
    file = shard.with_name("manifest.json")
    manifest = read_json(file)
    manifest["shards"][0]["files"][shard.name]["sha256"] = sha256_of(shard)
    file.write_text(json.dumps(manifest | {"hash": store._hash(manifest)}))
    with pytest.raises(DataError, match="the id 300, and the tokenizer 258 ids"):
        here(monkeypatch, *words, "--run-dir", str(tmp_path / "never"))
    assert not (tmp_path / "never").exists()


def test_step_guard_keeps_weights_and_moments():
    settings = ModelSettings(dim=24, layers=1, heads=3)
    model = Transformer(settings, 11, 7).initialize(0)
    t = TrainingSettings(optimizer=AdamWSettings(lr=0.1))
    parallel = Parallel(t)
    state = TrainState.create(model, RunSettings(training=t), parallel)
    requests = StopRequests()
    tokens = torch.arange(10).reshape(2, 5)
    good = StepBatch([MicroBatch(tokens, tokens + 1, TokenPositions.plain(5))], 10, {})

    def step():
        return train.train_step(state, good, parallel, t, requests)

    step()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    moments = [
        value.clone() for entry in state.optimizer.state.values() for value in entry.values()
    ]
    hook = model.norm.register_full_backward_hook(lambda m, i, o: (i[0] * float("nan"),))
    bad = step().read()
    hook.remove()
    assert math.isfinite(bad.loss) and math.isnan(bad.grad_norm) and bad.stopped
    requests.request(INTERRUPTED)
    after = step().read()
    assert math.isfinite(after.grad_norm) and after.status == INTERRUPTED
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    now = [value for entry in state.optimizer.state.values() for value in entry.values()]
    assert all(a.equal(b) for a, b in zip(now, moments, strict=True))


@pytest.mark.parametrize("bos", [True, False])
def test_samples_start_with_bos(overrides, tmp_path, monkeypatch, bos):
    prompts = []
    real = validation.Generation

    def generation(model, ids, *args, **more):
        prompts.extend(ids)
        return real(model, ids, *args, **more)

    monkeypatch.setattr(validation, "Generation", generation)
    overrides = [
        *overrides,
        "training.tokens=576",
        f"data.bos={bos}",
        f"data.root={tmp_path / 'prepared'}",
    ]
    overrides += ["training.samples.prompts=[abc]", "data.eos=true"]
    assert here(monkeypatch, *overrides, "--run-dir", str(tmp_path / "run")) == 0
    tokenizer = Run.open(tmp_path / "run").load().tokenizer
    assert prompts == [
        [tokenizer.bos_id, *tokenizer.encode("abc")] if bos else tokenizer.encode("abc")
    ]
