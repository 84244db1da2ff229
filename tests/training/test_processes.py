"""Several processes: equal to one under DDP, FSDP2 and context parallelism; errors and lost
processes end all of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from data.data_settings import DataSettings
from data.preparation.preparation import prepare
from errors import FAILED, RANK_LOST, REQUEUE, TrainingError
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import TokenPositions
from run_directory.checkpoints import find_checkpoint, steps_of
from run_directory.console import Console
from run_directory.position_overrides import make_model
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from run_directory.training_settings import TrainingSettings
from run_directory.weights import is_sharded, weights_of
from settings.load import load_settings
from tests.files import ROOT
from tests.processes import ScriptProcess, computed_once
from tests.training.conftest import environment
from tests.training.curves import CLIP, Training, shared
from tests.training.net import SKIP
from tests.training.ranks import BUSY, HOST_TIMEOUT, TIMEOUT
from tests.training.tiny import cut, lines, trained
from training.micro_batches import make_sampler, micro_batches
from training.parallel import Parallel
from training.train_state import TrainState

STEPS = 20
# Windows of several documents: ranks and micro-batches have unequal numbers of targets.
SMALL = [
    "train_length=24",
    "model={dim: 32, layers: 2, heads: 4, kv_heads: 2}",
    "data.packing=intra_document",
    "training={batch_size: 8, tokens: 20k, precision: float64, validation: {targets: 8}}",
]
TINY = [
    *("configs/tiny.yaml", "train_length=32", "data.packing=intra_document"),
    *("training.batch_size=4", "training.validation.targets=8"),
]
SHARDED = "training.parallel.sharding=full"
CONTEXT = "training.parallel.context=2"
NARROW = "training.residual_dtype=autocast"
RECOMPUTED = "training.parallel.activation_checkpointing=true"
ONE_EACH = "training.micro_batch_size=1"
PLAIN = "data.packing=concat"


@pytest.fixture(scope="session")
def prepared(corpus, prepared_root):
    source = {"name": "files", "path": str(corpus)}
    data = {"source": source, "tokenizer": {"name": "bytes"}, "valid_fraction": 0.2}
    data |= {"packing": "intra_document", "root": str(prepared_root)}
    return prepare(DataSettings.model_validate(data), Console(quiet=True))


def farthest(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """The largest difference of a loss or a gradient norm."""
    assert len(a) == len(b)
    return float(np.abs(np.subtract(a, b)).max())  # NaN if any is


# One process


@pytest.fixture(scope="module")
def curve(prepared) -> list[tuple[float, float]]:
    return Training(SMALL, prepared).steps(0, STEPS)


def test_gradient_accumulation_matches_single_batch(curve, prepared):
    assert farthest(curve, Training([*SMALL, ONE_EACH], prepared).steps(0, STEPS)) < 1e-10
    assert len({loss for loss, _ in curve}) == STEPS
    assert curve[-1][0] < curve[0][0] - 0.3


def test_loss_is_mean_over_all_targets(curve, prepared):
    """The first updates from the definition: mean over the step's targets, whole gradient clipped,
    torch's AdamW with decay of matrices."""
    settings = load_settings(RunSettings, SMALL)
    model = make_model(settings, prepared.tokenizer.vocab_size).initialize(5).double()
    a = settings.training.optimizer
    batches = make_sampler(settings, prepared)
    weights = list(model.parameters())
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and name != "embed.weight"]
    others = [w for w in weights if all(w is not matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, a.lr, a.betas, a.eps, a.weight_decay, foreach=False)
    for n in (1, 2, 3):
        batch = batches.batch(n - 1)
        (whole,) = micro_batches(batch, len(batch.tokens), 24)
        nll = model(whole.tokens, whole.positions, whole.targets)
        loss = nll.sum() / (batch.targets >= 0).sum()
        adamw.zero_grad()
        loss.backward()
        norm = sum(float(w.grad.pow(2).sum()) for w in weights) ** 0.5
        assert norm > CLIP
        assert curve[n - 1] == pytest.approx((loss.item(), norm), rel=1e-12)
        for w in weights:
            w.grad *= CLIP / (norm + 1e-6)
        adamw.step()


GOLDEN = json.loads(Path(__file__).with_name("golden_losses.json").read_text("utf-8"))


def test_golden_losses_of_tiny_config(prepared):
    """20 losses of configs/tiny.yaml's model in float64; regenerated only with a line in
    docs/experiments.md.

    The weights are drawn in float32, whose last bit depends on the machine: without AVX2 losses
    differ by up to 1.6e-7. 1e-6 leaves room for that; any change of a formula is far above it."""
    steps = Training([*TINY, "training.precision=float64"], prepared).steps(0, 20)
    assert [loss for loss, _ in steps] == pytest.approx(GOLDEN["loss"], abs=1e-6)
    assert [norm for _, norm in steps] == pytest.approx(GOLDEN["grad_norm"], rel=1e-5)
    float32 = Training([*TINY, "training.precision=float32", ONE_EACH], prepared).steps(0, 10)
    assert [loss for loss, _ in float32] == pytest.approx(GOLDEN["loss"][:10], abs=1e-5)


def test_launches_that_are_rejected(monkeypatch, prepared):
    with pytest.raises(TrainingError, match=r"sharding=full .* accelerate launch --config_file"):
        Training([*SMALL, SHARDED], prepared)
    parallel = Parallel(TrainingSettings())
    monkeypatch.setattr(parallel, "gather", lambda value: [4, 4, 0])
    with pytest.raises(TrainingError, match="the step is 0 on process 2 and 4 on process 0: fix"):
        parallel.agree(4, "the step", "fix")


# DDP and FSDP2


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_matches_single_process(curve, prepared, world):
    def work():
        tiny = Training([*TINY, "training.precision=float32"], prepared).steps(0, 10)
        return Training([*SMALL, ONE_EACH], prepared).steps(0, STEPS), tiny

    for small, tiny in shared(world, work):
        assert farthest(small, curve) < 1e-10
        assert [loss for loss, _ in tiny] == pytest.approx(GOLDEN["loss"][:10], abs=1e-5)


# What is tied; learned by positions for each layer, and one number alone; another optimizer.
SCHEMES = {
    "rope": ["model.tie_embeddings=true"],
    "fox": ["model.position.name=fox"],
    "fire": ["model.position.name=fire", "training.ema={decay: 0.7, start: 1}"],
    "muon": ["training.optimizer.name=muon"],
}


def probe(training: Training, prepared) -> list[float]:
    """NLL of a window of held-out text, and greedy tokens after a prompt; every process calls it
    alike."""
    tokens = torch.from_numpy(prepared.valid.document(0)[:25].astype("int64"))[None]
    training.model.eval()
    with torch.no_grad():
        nll = training.model(tokens[:, :-1], TokenPositions.plain(24), tokens[:, 1:])
    new = Generation(training.model, [[7, 9, 11]], 5, SamplingParams(temperature=0))
    values = nll.flatten().tolist() + [token for (token,) in new]
    training.model.train()
    return values


def skip_update(training: Training, prepared) -> None:
    """A backward pass whose update is skipped."""
    tokens = torch.from_numpy(prepared.valid.document(1)[:25].astype("int64"))[None]
    nll = training.model(tokens[:, :-1], TokenPositions.plain(24), tokens[:, 1:])
    nll.mean().backward()
    training.state.optimizer.step(SKIP)
    training.model.zero_grad()


def history(overrides, prepared, folder=None, prepare=None) -> dict:
    """Two updates, an evaluation, a skipped update, two more; saved; two more."""
    training = Training([*SMALL, *overrides], prepared, prepare)
    curve = training.steps(0, 2)
    probed = probe(training, prepared)
    skip_update(training, prepared)
    curve += training.steps(2, 4)
    if folder is not None:
        training.save(folder)
    weights = list(training.model.parameters())
    held = sum(w.to_local().numel() for w in weights if is_sharded(w))
    sizes = (held, sum(w.numel() for w in weights))
    curve += training.steps(4, 6)
    return {"curve": curve, "probe": probed, "sizes": sizes, "mean": mean_of(training)}


def mean_of(training: Training) -> dict[str, list]:
    """The mean of the weights, whole; {} where none is kept."""
    means = training.state.ema.means if training.state.ema else {}
    wholes = {name: x.full_tensor() if is_sharded(x) else x for name, x in means.items()}
    return {name: mean.tolist() for name, mean in wholes.items()}


def resumed(overrides, prepared, folder) -> dict:
    """The two updates after a checkpoint, and the mean of the weights after them."""
    training = Training([*SMALL, *overrides], prepared)
    training.state.restore(find_checkpoint(folder))
    assert training.state.step == 4
    return {"curve": training.steps(4, 6), "mean": mean_of(training)}


def in_bfloat16(overrides, prepared) -> dict:
    """Losses under autocast, dtypes of the weights and the input of an MLP, and of the state."""
    training = Training([*SMALL, "training.precision=bfloat16", *overrides], prepared)
    dtypes = set()

    def look(mlp, given):
        dtypes.add(f"{mlp.gate.weight.dtype} {given[0].dtype}")

    training.model.layers[0].mlp.register_forward_pre_hook(look)
    curve = training.steps(0, 4)
    state = [*training.model.parameters(), *training.state.optimizer.saved_tensors().values()]
    at_rest = {str(x.dtype) for x in state}
    return {"curve": curve, "in pass": list(dtypes), "at rest": list(at_rest)}


def by_block(model) -> None:
    # Dynamo's own look at what it is given; only in the fork that this is called in.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model.compile(by_block=True, backend="eager", fullgraph=True)


@pytest.fixture(scope="module")
def whole_models(prepared, tmp_path_factory):
    """Every scheme trained by one process that holds it all, and where it was saved."""

    def train(root: Path) -> dict:
        return {name: history(case, prepared, root / name) for name, case in SCHEMES.items()}

    return computed_once(tmp_path_factory, "whole", train)


def by_parts(overrides, prepared, folder) -> dict:
    return history([SHARDED, "training.micro_batch_size=2", *overrides], prepared, folder)


@pytest.fixture(scope="module")
def halves(prepared, tmp_path_factory, whole_models):
    """The same by two processes that hold half each; all in one launch."""
    fire = [SHARDED, *SCHEMES["fire"]]

    def work(root: Path) -> dict:
        results = {name: by_parts(case, prepared, root / name) for name, case in SCHEMES.items()}
        compiled = [SHARDED, RECOMPUTED, *SCHEMES["rope"]]
        return results | {
            "compiled": history(compiled, prepared, prepare=by_block),
            "bfloat16": in_bfloat16([SHARDED, RECOMPUTED], prepared),
            "narrow": in_bfloat16([SHARDED, RECOMPUTED, NARROW], prepared),
            "narrow context": in_bfloat16([CONTEXT, PLAIN, NARROW], prepared),
            "resumed": resumed(fire, prepared, root / "fire"),
            "resumed from one": resumed(fire, prepared, whole_models[0] / "fire"),
            "resumed by all": resumed(SCHEMES["fire"], prepared, root / "fire"),
        }

    return computed_once(tmp_path_factory, "halves", lambda root: shared(2, lambda: work(root)))


def check_halves(ranks: list[dict], expected: dict, loss: float, norm: float) -> None:
    """Two processes agree with one, and each holds about half of the model."""
    for rank in ranks:
        distance = np.abs(np.subtract(rank["curve"], expected["curve"])).max(axis=0)
        assert distance[0] < loss
        assert distance[1] < norm
        assert rank["probe"] == pytest.approx(expected["probe"], abs=loss)
    (a, whole), (b, _) = (rank["sizes"] for rank in ranks)
    assert a + b == whole
    assert max(a, b) < 0.6 * whole


@pytest.mark.parametrize("case", [*SCHEMES, "compiled"])
def test_sharded_training_matches_unsharded(whole_models, halves, case):
    """`compiled` recomputes activations, too."""
    tolerances = (1e-4, 1e-3) if case == "muon" else (1e-10, 1e-9)
    expected = whole_models[1]["rope" if case == "compiled" else case]
    check_halves([rank[case] for rank in halves[1]], expected, *tolerances)


def test_sharded_gathers_are_bfloat16_and_parameters_float32(halves, prepared):
    whole = in_bfloat16([], prepared)
    assert whole["in pass"] == ["torch.float32 torch.float32"]
    for rank in (rank["bfloat16"] for rank in halves[1]):
        assert rank["in pass"] == ["torch.bfloat16 torch.float32"]
        assert rank["at rest"] == whole["at rest"] == ["torch.float32"]
        assert farthest(rank["curve"], whole["curve"]) < 2e-2


def test_residual_stream_of_bfloat16_is_equal_on_ranks(halves, prepared):
    for case, overrides, weights in (
        ("narrow", [NARROW], "torch.bfloat16"),
        ("narrow context", [NARROW, PLAIN], "torch.float32"),
    ):
        whole = in_bfloat16(overrides, prepared)
        assert whole["in pass"] == ["torch.float32 torch.bfloat16"]
        for rank in (rank[case] for rank in halves[1]):
            assert rank["in pass"] == [f"{weights} torch.bfloat16"]
            assert rank["at rest"] == ["torch.float32"]
            assert farthest(rank["curve"], whole["curve"]) < 2e-2


def test_sharded_checkpoint_resumes_at_other_world_sizes(whole_models, halves, prepared):
    root, ranks = halves
    expected = whole_models[1]["fire"]

    def is_continued(result):
        assert farthest(result["curve"][-2:], expected["curve"][4:]) < 1e-9
        assert result["mean"].keys() == expected["mean"].keys() != set()
        for name, mean in expected["mean"].items():
            np.testing.assert_allclose(result["mean"][name], mean, rtol=0, atol=1e-10)

    for rank in ranks:
        for name in ("fire", "resumed", "resumed from one", "resumed by all"):
            is_continued(rank[name])
    files = {file.name for file in find_checkpoint(root / "fire").folder.iterdir()}
    kinds = ("model-00001", "optimizer-00002", "average-00001", "average-00002")
    assert {f"{kind}-of-00002.safetensors" for kind in kinds} <= files
    is_continued(resumed(SCHEMES["fire"], prepared, root / "fire"))


def test_a_missing_or_altered_shard_is_detected(halves, tmp_path):
    shutil.copytree(halves[0] / "rope", tmp_path / "run")
    file = find_checkpoint(tmp_path / "run").folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    with pytest.raises(TrainingError, match=f"{file.name} is altered"):
        find_checkpoint(tmp_path / "run")
    file.unlink()
    with pytest.raises(TrainingError, match=f"{file.name} is missing"):
        find_checkpoint(tmp_path / "run")


# Context parallelism

CONTEXT_CASES = {
    "rope": ["model.qk_norm=true", "training.micro_batch_size=3", "training.z_loss=1e-3"],
    "fox": ["model.position.name=fox", SHARDED, PLAIN],
    "selective_rope": ["model.position.name=selective_rope", RECOMPUTED],
    "ssmax": [
        "model.position={name: rope, temperature: {name: ssmax}, sink_logit: learned}",
        "training.parallel.activation_checkpointing=selective",
    ],
    "random": ["data.positions={name: random_subset, max_length: 64}", PLAIN],
    "linear": ["model.mixer={name: linear, chunk: 4}"],
}
FOUR = [*SMALL, "training.batch_size=4", "training.tokens=8k"]
FEW = 3


def steps(overrides: list[str], prepared, count: int = STEPS) -> list[tuple[float, float]]:
    return Training([*FOUR, *overrides], prepared).steps(0, count)


def one_process(overrides: list[str]) -> list[str]:
    return [word for word in overrides if word != SHARDED]


@pytest.fixture(scope="module")
def context_pair(prepared, tmp_path_factory):
    """Every case in one group of two processes; a checkpoint of one of them, continued without
    context parallelism."""

    def work(folder: Path) -> dict:
        results = {
            name: steps([*case, CONTEXT], prepared, FEW) for name, case in CONTEXT_CASES.items()
        }
        first = Training([*FOUR, CONTEXT], prepared)
        start = first.steps(0, 2)
        first.save(folder)
        second = Training(FOUR, prepared)
        second.state.restore(find_checkpoint(folder))
        return results | {"resumed": [*start, *second.steps(2, 4)]}

    return computed_once(tmp_path_factory, "context", lambda root: shared(2, lambda: work(root)))


@pytest.mark.parametrize("case", CONTEXT_CASES)
def test_shared_windows_equal_those_of_one_process(context_pair, prepared, case):
    expected = steps(one_process(CONTEXT_CASES[case]), prepared, FEW)
    assert expected[-1][0] < expected[0][0]
    for rank in context_pair[1]:
        assert farthest(rank[case], expected) < 1e-10


def test_checkpoint_continues_with_any_number_of_processes(context_pair, prepared):
    folder, ranks = context_pair
    expected = steps([], prepared, 4)
    assert all(farthest(rank["resumed"], expected) < 1e-10 for rank in ranks)
    alone = Training(FOUR, prepared)
    alone.state.restore(find_checkpoint(folder))
    assert farthest(alone.steps(2, 4), expected[2:]) < 1e-10


@pytest.mark.slow
def test_context_groups_divide_the_batch(prepared):
    """Four processes in two groups, under DDP and FSDP2."""
    ranks = shared(4, lambda: [steps([*more, CONTEXT], prepared) for more in ([], [SHARDED])])
    expected = steps([], prepared)
    assert all(farthest(curve, expected) < 1e-10 for rank in ranks for curve in rank)


# Carried states

DELTA = "{name: recurrent, decay: head, delta: true, unit_qk: true, beta: sigmoid, convolution: 3}"
CARRIED = [
    *("training.state=carry", "model.pattern=[delta, near]"),
    f"model.kinds={{delta: {{mixer: {DELTA}}}, near: {{position: {{window: 9}}}}}}",
]


def test_carried_states_with_ranks_micro_batches_and_resume(prepared, tmp_path):
    """Saved by two processes and resumed by one, and the other way round."""

    def saved(folder, *more):
        training = Training([*SMALL, *CARRIED, *more], prepared)
        curve = training.steps(0, 4)
        training.save(folder)
        return curve + training.steps(4, 6)

    def continued(folder):
        training = Training([*SMALL, *CARRIED], prepared)
        training.state.restore(find_checkpoint(folder), training.parallel)
        return training.steps(4, 6)

    expected = saved(tmp_path / "one")
    parts = saved(tmp_path / "parts", "training.micro_batch_size=3")
    assert farthest(parts, expected) < 1e-10
    reset = Training([*SMALL, *CARRIED, "training.state=reset"], prepared).steps(0, 1)
    assert abs(reset[0][0] - expected[0][0]) > 1e-6  # other windows
    for two, again in shared(2, lambda: (saved(tmp_path / "two"), continued(tmp_path / "one"))):
        assert farthest(two, expected) < 1e-10
        assert farthest(again, expected[4:]) < 1e-10
    assert farthest(continued(tmp_path / "two"), expected[4:]) < 1e-10
    assert continued(tmp_path / "one") == expected[4:]


# Runs of train.py


@pytest.fixture
def exact(overrides):
    return [*overrides, "training.precision=float64", "data.packing=intra_document"]


def differ(run: Path, other: Path) -> float:
    """The largest difference of a loss or norm between two runs on the same data."""
    largest = 0.0
    for a, b in zip(lines(run), lines(other), strict=True):
        assert (a["kind"], a["step"]) == (b["kind"], b["step"])
        if a["kind"] == "train":
            assert (a["data"], a["targets"]) == (b["data"], b["targets"])
            for key in ("loss", "grad_norm"):
                largest = max(largest, abs(a[key] - b[key]))
        if a["kind"] == "validation":
            for length, nll in a["nll"].items():
                largest = max(largest, abs(nll - b["nll"][length]))
    return largest


def assert_close_weights(run: Path, other: Path, atol: float = 1e-10, **load) -> dict:
    ours, theirs = (weights_of(Run(folder).load(**load).model) for folder in (run, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor,
            theirs[name],
            rtol=0,
            atol=atol,
            msg=name,
        )
    return ours


def test_two_processes_match_single_process(exact, tmp_path):
    assert trained(*exact, "--run-dir", tmp_path / "one") == 0
    two = [*exact, "training.micro_batch_size=3", "--run-dir", tmp_path / "two"]
    assert shared(2, lambda: trained(*two)) == [0, 0]
    assert differ(tmp_path / "one", tmp_path / "two") < 1e-9
    manifest = Run(tmp_path / "two").manifest
    parallel = manifest["attempts"][-1]["parallel"]
    assert (parallel["processes"], parallel["kind"]) == (2, "MULTI_CPU")


def test_sharded_run_end_to_end(exact, tmp_path, capsys):
    """Two processes shard it, one goes on with it whole, two again with their parts; one file in
    the end."""
    whole = tmp_path / "whole"
    folder = tmp_path / "sharded"
    exact += ["training.checkpoint={interval: 3, keep: 9}", "training.ema={decay: 0.7, start: 2}"]
    parallel = "{sharding: full, processes: 2, activation_checkpointing: true}"
    sharded = [*exact, f"training.parallel={parallel}", "--run-dir", folder]
    newest = folder / "checkpoints" / "step-00000012"
    assert trained(*exact, "--run-dir", whole) == 0
    assert shared(2, lambda: trained(*sharded)) == [0, 0]
    assert differ(whole, folder) < 1e-9
    assert (newest / "model-00002-of-00002.safetensors").is_file()
    means = assert_close_weights(folder, whole)
    last = assert_close_weights(folder, whole, weights="last")
    assert max((means[name] - last[name]).abs().max() for name in means) > 1e-3
    cut(folder, 3)
    assert trained(*exact, "--run-dir", folder) == 0
    assert differ(whole, folder) < 1e-9
    assert (newest / "model.safetensors").is_file()
    assert "training.parallel.sharding: full → auto" in capsys.readouterr().err
    cut(folder, 9)  # now a whole checkpoint, read in parts
    assert shared(2, lambda: trained(*sharded)) == [0, 0]
    assert differ(whole, folder) < 1e-9
    assert_close_weights(folder, whole)


def test_single_process_sharding_with_bfloat16_gathers(overrides, tmp_path):
    """As on a single GPU: validation, samples and checkpoints of blocks gathered in bfloat16."""
    overrides += ["training.precision=bfloat16", "training.samples.tokens=1"]
    assert trained(*overrides, "--run-dir", tmp_path / "whole") == 0
    overrides += ["training.parallel={sharding: full, processes: 1}"]
    assert shared(1, lambda: trained(*overrides, "--run-dir", tmp_path / "sharded")) == [0]
    assert differ(tmp_path / "whole", tmp_path / "sharded") < 0.02
    assert lines(tmp_path / "sharded", "samples")[0]["samples"]
    assert_close_weights(tmp_path / "sharded", tmp_path / "whole", atol=0.02)


def test_save_failure_is_reported_on_all_ranks(overrides, prepared, tmp_path):
    overrides += [SHARDED, "training.validation.interval=null", "--run-dir", tmp_path / "run"]

    def out_of_memory(state, carried):
        raise RuntimeError("out of memory")

    def work() -> str:
        with pytest.MonkeyPatch.context() as patch:
            if os.environ["RANK"] == "1":
                patch.setattr(TrainState, "capture", out_of_memory)
            with pytest.raises((TrainingError, RuntimeError)) as caught:
                trained(*overrides)
        return f"{type(caught.value).__name__}: {caught.value}"

    zero, one = shared(2, work, seconds=90)
    assert zero == "TrainingError: process 1 could not save: out of memory"
    assert one == "RuntimeError: out of memory"
    assert not list(tmp_path.glob("run/checkpoints/*"))


# A process that is killed, hangs, gets a signal, or computes non-finite values

RANKS = [
    *("train_length=24", "model={dim: 32, layers: 2, heads: 4, kv_heads: 2}"),
    *("data.source.name=files", "data.tokenizer.name=bytes", "data.valid_fraction=0.2"),
    *("training.tokens=1536", "training.batch_size=8", "training.checkpoint.interval=3"),
    *("training.validation={interval: null, spans: 4, targets: 8}", "training.samples.prompts=[]"),
    "training.precision=float32",
]


@pytest.fixture(scope="module")
def results(corpus, prepared_root, tmp_path_factory, prepared):
    """Runs the scenarios of ranks.py; returns their folder and results."""
    words = [*RANKS, f"data.source.path={corpus}", f"data.root={prepared_root}"]
    prepare(load_settings(RunSettings, words).data, Console(quiet=True))

    def run(folder: Path) -> dict:
        streams = (folder / "out", folder / "err")
        script = "tests/training/ranks.py"
        process = ScriptProcess(script, [str(folder), *words], ROOT, *streams, environment())
        assert process.wait(400) == 0, streams[1].read_text()
        return json.loads((folder / "results.json").read_text())

    return computed_once(tmp_path_factory, "scenarios", run)


def test_non_finite_gradient_on_one_rank_skips_all_ranks(results):
    pair = results[1]["poisoned"]
    assert pair["statuses"] == [0, 0], pair["logs"]
    zero, one = pair["weights"]
    assert zero == one
    assert len(zero) == 8  # after every step
    assert zero[2] == zero[1]
    assert zero[4] == zero[3]
    assert len(set(zero)) == 6
    logged = lines(results[0] / "poisoned", "train")
    skipped = {line["step"]: line["skipped"] for line in logged if "skipped" in line}
    assert skipped == {3: "not finite", 5: "not finite"}
    assert isinstance(logged[2]["loss"], float)
    assert logged[2]["grad_norm"] == "nan"
    assert logged[4]["loss"] == "inf"
    log = pair["logs"][0]
    assert "step 3 is skipped (not finite; number 1 of the run)" in log
    assert "number 2 of the run" in log


def test_signal_to_one_rank_saves_and_requeues_all_ranks(results):
    folder = results[0] / "signalled"
    pair = results[1]["signalled"]
    assert pair["statuses"] == [REQUEUE, REQUEUE], pair["logs"]
    assert "stopped by" in pair["logs"][0]
    assert "to resume" in pair["logs"][0]
    assert steps_of(folder) == [lines(folder, "train")[-1]["step"]]  # nothing is lost


def test_errors_of_one_rank_end_all_ranks_with_its_message(results):
    for name, main, other in (
        (
            "failing in the loop",
            "error: (process 0) process 1: shard 7 cannot be read",
            "error: (process 1) shard 7 cannot be read",
        ),
        ("unprepared", "scripts/prepare.py first", "2 processes were started"),
    ):
        pair = results[1][name]
        assert pair["statuses"] == [FAILED, FAILED], pair["logs"]
        for log, expected in zip(pair["logs"], (main, other), strict=True):
            assert expected in log, log
            assert log.count("error: ") == 1, log
            assert "Traceback" not in log, log
        assert pair.get("seconds", 0) < BUSY  # no collective waits for its time-out
        assert not pair.get("left")


def check_lost(pair: dict, number: int, timeout: float) -> None:
    """Rank 0 has left with RANK_LOST and one message, in time."""
    assert pair["statuses"] == [RANK_LOST, -signal.SIGKILL], pair["logs"]
    text = pair["logs"][0]
    assert "error: (process 0) " in text
    assert text.count("error: ") == 1
    assert "resume from the last checkpoint" in text
    if number == signal.SIGSTOP:
        assert "another process hangs" in text
        assert timeout / 2 < pair["seconds"] < timeout + BUSY
    else:
        assert "another process has ended" in text
        assert pair["seconds"] < TIMEOUT + BUSY


def test_lost_rank_is_detected_and_resumes_from_checkpoint(results):
    check_lost(results[1]["stopped in a gather"], signal.SIGSTOP, TIMEOUT)
    run = results[0] / "stopped-in-a-gather"
    # A checkpoint was due after every step: at most the one under way is lost.
    assert lines(run, "train")[-1]["step"] - steps_of(run)[-1] <= 1


def test_lost_rank_before_first_step_is_detected(results):
    """The main rank worked for longer than a step may take, then the other was lost."""
    pair = results[1]["killed early"]
    check_lost(pair, signal.SIGKILL, HOST_TIMEOUT)
    assert pair["steps"] == 0
    assert pair["logs"][1] == ""
    assert not (results[0] / "killed-early" / "checkpoints").exists()
