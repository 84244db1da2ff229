"""Invalid runs are rejected, and forecasts printed, before any compute."""

import io
from contextlib import nullcontext, redirect_stdout
from types import SimpleNamespace

import pytest
import torch

from errors import DataError, TrainingError, UserError
from run_directory.position_overrides import make_model, meta_model
from run_directory.run_settings import ParentSettings, RunSettings
from run_directory.training_schedule import flops_of
from settings.load import load_settings
from tests.files import ROOT
from tests.model.zoo import build, ids
from tests.training.conftest import REFUSED
from tests.training.tiny import trained
from training import dry_run, memory_estimate
from training.feasibility import check_model, check_processes
from training.hardware import known_peak
from training.memory_estimate import activations, gathered_keys, memory
from training.setup import TrainingRun
from training.train_options import parse_options

CONFIGS = ROOT / "configs"
LEARNED = "model.position.name=learned train_length=64 "


def load(*overrides: str) -> RunSettings:
    return load_settings(RunSettings, ["data.tokenizer.name=bytes", *overrides])


def refused(message):
    return pytest.raises(TrainingError, match=message) if message else nullcontext()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model.position.max_length=63", "train_length 64 .* needs 64 positions, .* has 63"),
        (
            "model.position.max_length=127 training.validation.multiples=[4,2]",
            "is 128 .* 127",
        ),
        ("model.position.max_length=128 training.validation.multiples=[2]", None),
        ("", None),
    ],
)
def test_learned_tables_must_cover_the_lengths(overrides, message):
    with refused(message):
        check_model(load(*(LEARNED + overrides).split()))


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "position").glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_suggested_scheme_fits_tiny_model(file):
    check_model(load_settings(RunSettings, [str(CONFIGS / "tiny.yaml"), str(file)]))


CARRIED = ["training.state=carry", "data.packing=intra_document", "model.mixer.name=recurrent"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    REFUSED["carried"],
)
def test_a_carried_state_requires_consecutive_windows(overrides, key):
    with pytest.raises(UserError, match=key) if key else nullcontext():
        check_model(load(*CARRIED, overrides))


SMALL = ["train_length=24", "training.batch_size=4", "training.validation.targets=8"]


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    REFUSED["divided"],
)
def test_work_that_cannot_be_divided_is_rejected(overrides, processes, message):
    settings = load(*SMALL, "training.tokens=20k", *overrides)
    groups = processes // settings.training.parallel.context
    parallel = SimpleNamespace(data_world=groups, sharded=message is None or "sharding" in message)
    with refused(message):
        check_processes(settings, parallel)


def test_options_that_are_settings(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    options = parse_options("", ["seed=3", "--data", str(tmp_path), "--fork", "runs/x"])
    assert str(tmp_path) in options.overrides[0]
    assert options.overrides[1:] == ["seed=3", "parent.run=runs/x", "parent.fork=true"]
    assert options.command[:2] == ["train.py", "seed=3"]


# Memory and time

SHAPE = ["train_length=64", "model.dim=64", "model.heads=2", "model.layers=3"]


def devices(world: int = 1, sharded: bool = False, half: bool = False) -> SimpleNamespace:
    """GPUs that share a run."""
    return SimpleNamespace(
        world=world,
        data_world=world,
        sharded=sharded,
        autocast_dtype=torch.bfloat16 if half else None,
        device=torch.device("cpu"),
        device_type="cuda",
        gather=lambda value: [value],
    )


def test_memory_of_weights_optimizer_and_average():
    plain = load(*SHAPE)
    averaged = load(*SHAPE, "training.ema={}")
    model = meta_model(plain, 258)
    p = model.parameter_count()
    for split, group in ((1, devices()), (4, devices(4, sharded=True))):
        needed = memory(model, averaged, group, 1)  # of several micro-batches
        keys = ("weights", "gradients", "moments", "mean")
        assert [needed[key] for key in keys] == [n * p / split for n in (4, 4, 8, 4)]
    wide = memory(model, load(*SHAPE, "training.precision=float64"), devices(), 8)
    narrow = memory(model, plain, devices(), 8)
    assert wide["weights"] == 8 * p
    assert wide["mean"] == 0
    assert wide["activations"] == 2 * narrow["activations"]
    assert memory(model, plain, devices(2), 8)["buckets"] == 4 * p
    # Of the current and the next block in bfloat16, one block's gradients in both dtypes, and both
    # for the embedding, the head and the last norm, which stay.
    outer = 2 * 258 * 64 + 64
    block = (p - outer) / 3
    sharded = memory(model, plain, devices(4, sharded=True, half=True), 2)
    expected = (2 * 2 + 2 + 4) * block + (2 + 2 + 4) * outer
    assert sharded["whole blocks"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "rows", "peak"),
    [("configs/base.yaml", 32, 12.2), ("configs/1b.yaml", 4, 26.6)],
)
def test_memory_is_that_of_two_compiled_runs(config, rows, peak):
    """Peaks in GiB of steps of one micro-batch on an H200 (docs/benchmarks/gpu/README.md)."""
    one = [f"training.batch_size={rows}", f"training.micro_batch_size={rows}"]
    settings = load(config, *one)
    model = meta_model(settings, 32_000)
    needed = memory(model, settings, devices(half=True), rows)
    assert sum(needed.values()) / 2**30 == pytest.approx(peak, rel=0.04)
    # with accumulation, gradients exist beside the activations
    more = memory(model, load(config, one[1]), devices(half=True), rows)
    assert more["gradients"] == more["weights"] > needed["gradients"]
    assert more["activations"] == needed["activations"]


@pytest.mark.parametrize(
    ("case", "lowest"),
    [
        ("none", 0.95),
        ("linear-cosine-none", 0.85),
        ("short_convolution-none", 0.85),
        ("mamba2-none", 0.8),
        ("gated_deltanet-none", 0.95),
        ("kda-none", 0.65),
    ],
)
def test_activations_are_those_that_autograd_saves(case, lowest):
    """Bytes of distinct storages, except the weights: at most 10% above the estimate."""
    model = build(case, dtype=torch.float32)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if x.is_floating_point() and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # kept, so that no address is used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(ids(4, 64))
    used = sum(storage.nbytes() for storage in saved.values())
    estimate = 4 * 64 * activations(model, 64, "none", 4, 4)
    assert lowest < used / estimate < 1.1


def test_gathered_keys_of_layers_with_a_window():
    """Per layer, 2 × 16 numbers per token: at most the 2 · 9 tokens before two chunks."""
    sizes = ["train_length=64", "model={dim: 32, layers: 2, heads: 4, kv_heads: 2}"]

    def numbers(position: str, length: int = 1024) -> float:
        model = make_model(load(*sizes, f"model.position={position}"), 50)
        return gathered_keys(model, length, "none", 4) / (2 * 2 * 16)

    assert numbers("{name: rope}") == numbers("{name: rope, window: 10, sinks: 2}") == 1024 * 7 / 8
    assert numbers("{name: rope, window: 10}") == 18
    assert numbers("{name: rope, window: 10}", 16) == 14


def test_a_run_that_does_not_fit_is_refused(overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: 1000)
    assert trained(*overrides, "--dry-run") == 1
    printed = capsys.readouterr()
    assert "measured" not in printed.out
    assert "will not fit" in printed.err
    with pytest.raises(TrainingError, match="--force"):
        trained(*overrides, "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert trained(*overrides, "--force", "--run-dir", tmp_path / "x") == 0


def test_flops_are_those_of_the_windows_that_are_left():
    stages = "training.stages=[{length: 16, duration: 0.4}, {length: 64}]"
    settings = load(*SHAPE, "training.batch_size=4", "training.tokens=2560", stages)
    model = meta_model(settings, 258)
    flops = 1024 * model.flops_per_token(16) + 1536 * model.flops_per_token(64)
    assert flops_of(settings, 258) == pytest.approx(flops, rel=1e-12)
    parent = ParentSettings(run="x", checkpoint=2, fork=True)  # 2 steps of 16 × 16 tokens
    fork = settings.model_copy(update={"parent": parent})
    flops -= 512 * model.flops_per_token(16)
    assert flops_of(fork, 258, fork.first_step) == pytest.approx(flops, rel=1e-12)


def test_time_is_that_of_measured_steps(overrides, monkeypatch):
    """12 steps take `seconds` each by a clock of the test."""
    seconds = 0.25
    now = [0.0]

    def step(state, *_):
        now[0] += seconds
        return SimpleNamespace(read=lambda: None)

    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: now[0])
    printed = []
    monkeypatch.setattr(dry_run, "duration", lambda total: printed.append(total) or "X")
    options = parse_options("", [*overrides, "--dry-run"])
    with redirect_stdout(io.StringIO()):
        assert dry_run.dry_run(TrainingRun(options, SimpleNamespace()), step) == 0
    assert printed == [pytest.approx(12 * seconds)]


@pytest.mark.parametrize(
    "name", ["quickstart", "studies/mup_base", "studies/hybrids_base", "studies/schemes_base"]
)
def test_published_configurations_do_not_depend_on_the_processor(name):
    assert load(str(CONFIGS / f"{name}.yaml")).training.precision == "float32"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("Tesla T4", None),  # no bfloat16
    ],
)
def test_peaks_of_gpus_by_the_names_that_torch_reports(name, peak, monkeypatch):
    """Dense products of bfloat16 in the vendors' data sheets, without sparsity."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert known_peak(torch.device("cuda")) == peak


def test_a_dry_run_refuses_the_items_of_the_validation_text():
    task = "{name: task, task: {name: passkey, haystack: {name: filler}}, items: 20, length: 400}"
    asked = [f"data.source={task}", f"data.valid_source={task}"]
    with pytest.raises(DataError, match=r"data\.source\.seed"):
        trained(ROOT / "configs/tiny.yaml", *asked, "--dry-run")
