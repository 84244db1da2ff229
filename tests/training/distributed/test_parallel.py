"""Training curves do not depend on the number of processes: DDP, gradient accumulation, FSDP2."""

from __future__ import annotations

import errno
import json
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from errors import TrainingError
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import ModelSettings, TokenPositions, Transformer
from run_directory import checkpoints as module
from run_directory.checkpoints import find_checkpoint, save_snapshot
from run_directory.exposure import make_sampler
from run_directory.run_settings import RunSettings
from run_directory.training_settings import TrainingSettings
from run_directory.weights import load_weights, weights_of
from settings.load import load_settings
from tests.training.distributed.curves import CLIP, Training, shared
from training.batches import micro_batches
from training.checkpointer import Checkpointer
from training.checks import make_model
from training.distributed.parallel import Parallel
from training.stop_requests import StopRequests

GOLDEN = Path(__file__).with_name("golden_losses.json")
STEPS = 20
# Windows of several documents: ranks and micro-batches have unequal numbers of targets.
SMALL = [
    "training.validation.targets=8",
    *("train_length=24", "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
    *("data.packing=intra_document", "training.batch_size=8", "training.tokens=20k"),
]
TINY = [
    *(
        "configs/tiny.yaml",
        "train_length=32",
        "data.packing=intra_document",
        "training.batch_size=4",
    ),
    "training.validation.targets=8",
]
SHARDED = "training.parallel.sharding=full"
# What is tied; learned by positions for each layer, and one number alone; another optimizer.
SCHEMES = {
    "rope": ["model.tie_embeddings=true"],
    "fox": ["model.position.name=fox"],
    "fire": ["model.position.name=fire", "training.ema={decay: 0.7, start: 1}"],
    "muon": ["training.optimizer.name=muon"],
}
# Learned by positions for the model, and in a layer's softmax.
OTHERS = {
    "kerple": ["model.position.name=kerple", "model.tie_embeddings=false"],
    "ssmax": ["model.position={name: rope, temperature: {name: ssmax}, sink_logit: learned}"],
}


@pytest.fixture(scope="module")
def curves(prepared):
    """Losses and norms of 20 steps in float64: one process, and accumulated over eight passes."""

    def trained(*more):
        return Training([*SMALL, "training.precision=float64", *more], prepared).steps(0, STEPS)

    return trained(), trained("training.micro_batch_size=1")


def differ(a, b) -> float:
    return float(np.max([abs(x[0] - y[0]) for x, y in zip(a, b, strict=True)]))  # NaN if any is


def test_gradient_accumulation_matches_single_batch(curves):
    one, eight = curves
    assert differ(one, eight) < 1e-10
    assert len({loss for loss, _ in one}) == STEPS and one[-1][0] < one[0][0] - 0.3


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_matches_single_process(curves, prepared, world):
    def work():
        small = [*SMALL, "training.micro_batch_size=1", "training.precision=float64"]
        tiny = [*TINY, "training.precision=float32"]
        return Training(small, prepared).steps(0, STEPS), Training(tiny, prepared).steps(0, 10)

    golden = json.loads(GOLDEN.read_text())["loss"]
    for small, tiny in shared(world, work):
        assert [loss for loss, _ in tiny] == pytest.approx(golden[:10], abs=1e-5)
        assert differ(small, curves[0]) < 1e-10


def test_loss_is_mean_over_all_targets(curves, prepared):
    """The first updates from the definition: mean over the step's targets, whole gradient clipped,
    AdamW."""
    settings = load_settings(RunSettings, SMALL)
    model = make_model(settings, prepared.tokenizer.vocab_size).initialize(5).double()
    a = settings.training.optimizer
    batches = make_sampler(settings, prepared)
    moments = {
        name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in model.named_parameters()
    }
    for number in range(3):
        batch = batches.batch(number)
        (part,) = micro_batches(batch, None, 24, torch.device("cpu"))
        nll = model(part.tokens, part.positions, part.targets)
        loss = nll.sum() / (batch.targets >= 0).sum()
        model.zero_grad()
        loss.backward()
        norm = sum(float(w.grad.pow(2).sum()) for w in model.parameters()) ** 0.5
        assert norm > CLIP
        assert curves[0][number] == pytest.approx((loss.item(), norm), rel=1e-12)
        with torch.no_grad():
            for name, w in model.named_parameters():
                g = w.grad * CLIP / (norm + 1e-6)
                (m, v) = moments[name]
                m.lerp_(g, 1 - a.betas[0])
                v.lerp_(g * g, 1 - a.betas[1])
                decay = a.weight_decay if w.ndim == 2 and name != "embed.weight" else 0.0
                w.mul_(1 - a.lr * decay)
                n = number + 1
                scaled = (v / (1 - a.betas[1] ** n)).sqrt() + a.eps
                w.sub_(a.lr * m / (1 - a.betas[0] ** n) / scaled)


def test_golden_losses_of_tiny_config(prepared):
    """20 losses of configs/tiny.yaml's model in float64; regenerated only with a line in
    docs/experiments.md.

    The weights are drawn in float32, whose last bit depends on the machine: without AVX2 losses
    differ by up to 1.6e-7. 1e-6 leaves room for that; any change of a formula is far above it."""
    found = Training([*TINY, "training.precision=float64"], prepared).steps(0, 20)
    golden = json.loads(GOLDEN.read_text())
    assert [loss for loss, _ in found] == pytest.approx(golden["loss"], abs=1e-6)
    assert [norm for _, norm in found] == pytest.approx(golden["grad_norm"], rel=1e-5)
    float32 = [*TINY, "training.precision=float32", "training.micro_batch_size=1"]
    ones = Training(float32, prepared).steps(0, 10)
    assert [loss for loss, _ in ones] == pytest.approx(golden["loss"][:10], abs=1e-5)


# Carried states


CARRIED = [
    "training.precision=float64",
    "training.state=carry",
    "model.pattern=[delta, near]",
    "model.kinds={delta: {mixer: {name: recurrent, decay: head, delta: true, unit_qk: true, "
    "beta: sigmoid, convolution: 3}}, near: {position: {window: 9}}}",
]


def test_carried_states_with_ranks_micro_batches_and_resume(prepared, tmp_path):
    """Saved by two processes and resumed by one, and the other way round."""

    def saved(folder, *more):
        training = Training([*SMALL, *CARRIED, *more], prepared)
        curve = training.steps(0, 4)
        carried = training.state.carried_rows(training.parallel)
        if training.parallel.main:
            save_snapshot(folder, training.state.capture(carried=carried))
        return curve + training.steps(4, 6)

    def continued(folder):
        training = Training([*SMALL, *CARRIED], prepared)
        training.state.restore(find_checkpoint(folder), training.parallel)
        return training.steps(4, 6)

    expected = saved(tmp_path / "one")
    assert differ(saved(tmp_path / "parts", "training.micro_batch_size=3"), expected) < 1e-10
    reset = Training([*SMALL, *CARRIED, "training.state=reset"], prepared).steps(0, 1)
    assert abs(reset[0][0] - expected[0][0]) > 1e-6  # other windows
    for two, again in shared(2, lambda: (saved(tmp_path / "two"), continued(tmp_path / "one"))):
        assert differ(two, expected) < 1e-10 and differ(again, expected[4:]) < 1e-10
    assert differ(continued(tmp_path / "two"), expected[4:]) < 1e-10
    assert continued(tmp_path / "one") == expected[4:]


# Sharded


def nll(training: Training, prepared) -> list[float]:
    """Of a window of held-out text, and greedy tokens after a prompt; called by every process
    alike."""
    tokens = torch.from_numpy(prepared.valid.document(0)[:25].astype("int64"))[None]
    training.model.eval()
    with torch.no_grad():
        found = training.model(tokens[:, :-1], TokenPositions.plain(24), tokens[:, 1:])
    new = list(Generation(training.model, [[7, 9, 11]], 5, SamplingParams(temperature=0)))
    training.model.train()
    return found.flatten().tolist() + [row[0] for row in new]


def sampler(overrides, prepared, folder=None, prepare=None) -> dict:
    """Two updates, an evaluation, two more; saved; two more."""
    training = Training([*SMALL, "training.precision=float64", *overrides], prepared, prepare)
    before = training.steps(0, 2)
    looked = nll(training, prepared)
    middle = training.steps(2, 4)
    if folder is not None and training.parallel.takes_part:
        save(folder, training)
    parts = [w for w in training.model.parameters() if isinstance(w, DTensor)]
    held = (
        sum(w.to_local().numel() for w in parts),
        sum(w.numel() for w in training.model.parameters()),
    )
    curve = [*before, *middle, *training.steps(4, 6)]
    return {"curve": curve, "nll": looked, "held": held, "mean": mean_of(training)}


def save(folder, training: Training) -> None:
    save_snapshot(folder, training.state.capture(), training.parallel.saving_group)


def mean_of(training: Training) -> dict[str, np.ndarray]:
    """The mean of the weights, whole; {} where none is kept."""
    means = training.state.ema.tensors() if training.state.ema else {}
    wholes = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in means.items()}
    return {name: mean.numpy().copy() for name, mean in wholes.items()}


def resumed(overrides, prepared, folder) -> tuple[list, dict]:
    """The two updates after a checkpoint, and the mean of the weights after them."""
    training = Training([*SMALL, "training.precision=float64", *overrides], prepared)
    training.state.restore(find_checkpoint(folder))
    assert training.state.step == 4
    return training.steps(4, 6), mean_of(training)


def saved_beside(overrides, prepared, folder) -> None:
    """Saved at once under the name `once`, and in a thread that is held back until the weights have
    moved on; then again and again, sums of the steps and words of the thread at the same time."""
    training = Training([*SMALL, "training.precision=float64", *overrides], prepared)
    training.steps(0, 4)
    save(folder / "once", training)
    settings = RunSettings.model_validate(
        {"training": {"checkpoint": {"asynchronous": True, "keep": 99}}}
    )
    run = SimpleNamespace(
        folder=folder / "beside",
        settings=settings,
        parallel=training.parallel,
        sampler=None,
        steps=9,
        requests=StopRequests(),
    )
    go_on = threading.Event()
    write = module.write_part
    module.write_part = lambda *args: go_on.wait(60) and write(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.checkpointer.make_ledger", lambda *_: None)
        saver = Checkpointer(run)
    with saver:
        for number in range(4, 10):
            if number < 8:
                saver._save(training.state, {}, wait=False)
            training.step(number)
            go_on.set()
    module.write_part = write


def in_bfloat16(overrides, prepared) -> dict:
    """Losses under autocast, and what an MLP is given: dtype of its weights and of its input."""
    training = Training([*SMALL, "training.precision=bfloat16", *overrides], prepared)
    seen = set()

    def look(module, given):
        seen.add((str(module.gate.weight.dtype), str(given[0].dtype)))

    training.model.layers[0].mlp.register_forward_pre_hook(look)
    curve = training.steps(0, 4)
    dtypes = {w.dtype for w in training.model.parameters()} | {m.dtype for m in moments(training)}
    return {"curve": curve, "seen": seen, "at rest": dtypes}


def disk_full_on_one(overrides, prepared, folder) -> str:
    """What a process says when the disk is full for the other."""
    training = Training([*SMALL, "training.precision=float64", *overrides], prepared)
    write = module.write_part

    def full(*args):
        if training.parallel.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    module.write_part = full
    try:
        training.state.step = 5
        save_snapshot(folder, training.state.capture(), training.parallel.saving_group)
    except TrainingError as error:
        return str(error)
    finally:
        module.write_part = write
    return "saved"


def moments(training: Training) -> list[torch.Tensor]:
    return [x for entry in training.state.optimizer.state.values() for x in entry.values()]


def by_block(model) -> None:
    # Dynamo's own look at what it is given; only in the fork that this is called in.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model.compile(by_block=True, backend="eager", fullgraph=True)


RECOMPUTED = "training.parallel.activation_checkpointing=true"


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """Every scheme trained by one process that holds it all, and where it was saved."""
    root = tmp_path_factory.mktemp("whole")
    return root, {
        name: sampler(overrides, prepared, root / name) for name, overrides in SCHEMES.items()
    }


def by_parts(overrides, prepared, folder) -> dict:
    return sampler([SHARDED, "training.micro_batch_size=2", *overrides], prepared, folder)


@pytest.fixture(scope="module")
def halves(prepared, tmp_path_factory, whole):
    """The same by two processes that hold half each; all in one launch."""
    root = tmp_path_factory.mktemp("halves")
    saved = whole[0]

    def work():
        found = {
            name: by_parts(overrides, prepared, root / name) for name, overrides in SCHEMES.items()
        }
        found["compiled"] = sampler(
            [SHARDED, RECOMPUTED, *SCHEMES["rope"]], prepared, prepare=by_block
        )
        found["bfloat16"] = in_bfloat16([SHARDED, RECOMPUTED], prepared)
        saved_beside([SHARDED, *SCHEMES["fire"]], prepared, root / "threads")
        found["full"] = disk_full_on_one([SHARDED, *SCHEMES["fox"]], prepared, root / "fox")
        found["resumed"] = {
            "same": resumed([SHARDED, *SCHEMES["fire"]], prepared, root / "fire"),
            "from one": resumed([SHARDED, *SCHEMES["fire"]], prepared, saved / "fire"),
            "unsharded": resumed(SCHEMES["fire"], prepared, root / "fire"),
        }
        return found

    return root, shared(2, work)


def check_halves(halves: list[dict], want: dict, loss: float, norm: float) -> None:
    """Two processes agree with one, and each holds about half of the model."""
    for found in halves:
        assert differ(found["curve"], want["curve"]) < loss
        assert (
            np.max([abs(a[1] - b[1]) for a, b in zip(found["curve"], want["curve"], strict=True)])
            < norm
        )
        assert found["nll"] == pytest.approx(want["nll"], abs=loss)
    parts, (whole, _) = zip(*(found["held"] for found in halves), strict=True)
    assert sum(parts) == whole and max(parts) < 0.6 * whole


@pytest.mark.parametrize("case", [*SCHEMES, "compiled"])
def test_sharded_training_matches_unsharded(whole, halves, case):
    """`compiled` recomputes activations, too."""
    tolerances = (1e-4, 1e-3) if case == "muon" else (1e-10, 1e-9)
    want = whole[1]["rope" if case == "compiled" else case]
    check_halves([rank[case] for rank in halves[1]], want, *tolerances)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_sharded_training_of_other_schemes_matches_unsharded(prepared, tmp_path, case):
    want = sampler(OTHERS[case], prepared)
    check_halves(
        shared(2, lambda: by_parts(OTHERS[case], prepared, tmp_path / case)), want, 1e-10, 1e-9
    )


def test_sharded_gathers_are_bfloat16_and_parameters_float32(halves, prepared):
    whole = in_bfloat16([], prepared)
    assert whole["seen"] == {("torch.float32", "torch.float32")} and whole["at rest"] == {
        torch.float32
    }
    for found in (rank["bfloat16"] for rank in halves[1]):
        assert found["seen"] == {("torch.bfloat16", "torch.float32")} and found["at rest"] == {
            torch.float32
        }
        assert differ(found["curve"], whole["curve"]) < 5e-3


def test_sharded_checkpoint_resumes_at_other_world_sizes(whole, halves, prepared):
    root, found = halves
    after = whole[1]["fire"]["curve"][4:]
    mean = whole[1]["fire"]["mean"]

    def as_in_one_go(found):
        curve, own = found
        assert differ(curve, after) < 1e-10 and own.keys() == mean.keys() != set()
        for name in mean:
            np.testing.assert_allclose(own[name], mean[name], rtol=0, atol=1e-10, err_msg=name)

    for rank in found:
        as_in_one_go((rank["fire"]["curve"][4:], rank["fire"]["mean"]))
        for again in rank["resumed"].values():
            as_in_one_go(again)
    files = {file.name for file in (root / "fire" / "checkpoints" / "step-00000004").iterdir()}
    kinds = ("model-00001", "optimizer-00002", "average-00001", "average-00002")
    assert {f"{kind}-of-00002.safetensors" for kind in kinds} <= files
    as_in_one_go(resumed(SCHEMES["fire"], prepared, root / "fire"))
    for again in shared(4, lambda: resumed([SHARDED, *SCHEMES["fire"]], prepared, root / "fire")):
        as_in_one_go(again)
    for name, overrides in SCHEMES.items():
        settings = load_settings(RunSettings, [*SMALL, *overrides])
        model = make_model(settings, prepared.tokenizer.vocab_size).double()
        load_weights(model, find_checkpoint(root / name))
        read = weights_of(model)
        load_weights(model, find_checkpoint(whole[0] / name))
        for key, tensor in weights_of(model).items():
            torch.testing.assert_close(read[key], tensor, rtol=0, atol=1e-10, msg=f"{name} {key}")


def test_full_disk_on_one_rank_fails_save_on_all_ranks(halves):
    root, found = halves
    assert all("disk full" in rank["full"] and "step 4 is intact" in rank["full"] for rank in found)
    assert [path.name for path in (root / "fox" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize(
    "name", ["model-00002-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"]
)
def test_corrupted_shard_is_detected_by_hash(halves, name):
    run = halves[0] / "rope"
    file = run / "checkpoints" / "step-00000004" / name
    good = file.read_bytes()
    for wrong, overrides in (
        (good[:-3], "bytes instead of"),
        (good[:-3] + b"abc", "does not match its hash"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(TrainingError, match=rf"{name}.*{overrides}"):
            find_checkpoint(run)
    file.unlink()
    with pytest.raises(TrainingError, match=rf"{name} is missing"):
        find_checkpoint(run)
    file.write_bytes(good)
    assert find_checkpoint(run) is not None


def test_ranks_with_different_state_are_rejected(monkeypatch):
    parallel = Parallel(TrainingSettings())
    monkeypatch.setattr(parallel, "gather", lambda value: [4, 4, 0])
    with pytest.raises(
        TrainingError, match="the step is 0 on process 2 and 4 on process 0: mend it"
    ):
        parallel.agree(4, "the step", "mend it")


@pytest.mark.parametrize(
    ("setting", "device", "compiled"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_models_are_compiled_on_gpus_by_default(setting, device, compiled, monkeypatch):
    parallel = Parallel(TrainingSettings(compile=setting))
    calls = []
    parallel.device = torch.device(device)
    monkeypatch.setattr(Transformer, "compile", lambda model, **options: calls.append(options))
    model = Transformer(ModelSettings(dim=24, layers=1, heads=3), 11, 7)
    parallel.wrap(model, compiled=TrainingSettings(compile=setting).compile)
    assert calls == ([{"by_block": False, "dynamic": True}] if compiled else [])


def test_sharding_without_launcher_suggests_command():
    with pytest.raises(TrainingError, match=r"sharding=full .* accelerate launch --config_file"):
        Training([*SMALL, SHARDED], None)
