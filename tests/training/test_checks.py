"""Invalid runs are rejected, and forecasts printed, before any compute."""

import io
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from errors import TrainingError, UserError
from run_directory.position_overrides import make_model, meta_model
from run_directory.run_settings import RunSettings
from run_directory.training_settings import ValidationSettings
from settings.load import load_settings
from tests.files import ROOT
from tests.model.zoo import build, ids
from tests.training.conftest import REFUSED
from tests.training.tiny import trained
from training import dry_run, memory_estimate
from training.checks import check_model, check_processes
from training.hardware import known_peak
from training.memory_estimate import MemoryLayout, fixes_for, gathered_keys
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
        ("model.position.max_length=63", "train_length 64 is longer than the 63 positions"),
        (
            "model.position.max_length=127 training.validation.multiples=[4,2]",
            "begins at 2 × 64 .* 127",
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


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({"interval": "auto"}, 600, {120, 240, 250, 360, 480, 500, 600}),
        ({"interval": "auto"}, 3, {1, 2, 3}),
        ({"interval": 50, "at": [0.25, 0.001, 3, 50]}, 100, {1, 3, 25, 50, 100}),
        ({"at": [101]}, 100, r"validation\.at has 101, and the run 100 steps"),
    ],
)
def test_validation_steps(settings, steps, expected):
    message = expected if isinstance(expected, str) else ""
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        assert ValidationSettings(**settings).steps(steps) == expected


def test_options_that_are_settings(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    options = parse_options("", ["seed=3", "--data", str(tmp_path), "--fork", "runs/x"])
    assert str(tmp_path) in options.overrides[0]
    assert options.overrides[1:] == ["seed=3", "parent.run=runs/x", "parent.fork=true"]
    assert options.command[:2] == ["train.py", "seed=3"]


# Memory and time

SHAPE = ["train_length=64", "model.dim=64", "model.heads=2", "model.layers=3"]
LAYOUT = MemoryLayout(world=1, sharded=False, sequences=8, half=False)


def test_memory_of_weights_optimizer_and_average():
    model = meta_model(load(*SHAPE), 258)
    p = model.parameter_count()
    for split, layout in (
        (1, replace(LAYOUT, mean=True)),
        (4, MemoryLayout(4, True, 2, half=False, mean=True)),
    ):
        needed = memory_estimate.memory(model, 64, layout)
        keys = ("weights", "gradients", "moments", "mean")
        assert [needed[key] for key in keys] == [n * p / split for n in (4, 4, 8, 4)]
    wide = memory_estimate.memory(model, 64, replace(LAYOUT, float_bytes=8))
    narrow = memory_estimate.memory(model, 64, LAYOUT)
    assert wide["weights"] == 8 * p
    assert wide["mean"] == 0
    assert wide["activations"] == 2 * narrow["activations"]
    ddp = memory_estimate.memory(model, 64, replace(LAYOUT, world=2))
    assert ddp["buckets"] == 4 * p
    # Of the current and the next block in bfloat16, one block's gradients in both dtypes, and both
    # for the embedding, the head and the last norm, which stay.
    outer = 2 * 258 * 64 + 64
    block = (p - outer) / 3
    sharded = memory_estimate.memory(model, 64, MemoryLayout(4, True, 2, half=True))
    expected = (2 * 2 + 2 + 4) * block + (2 + 2 + 4) * outer
    assert sharded["whole blocks"] == pytest.approx(expected)


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
    estimate = 4 * 64 * memory_estimate.activations(model, 64, LAYOUT)
    assert lowest < used / estimate < 1.1


def test_gathered_keys_of_layers_with_a_window():
    """In float32, per layer, 2 × 16 numbers per token: at most the 2 · 9 tokens before two chunks,
    and half of the tokens in one of two layers."""
    sizes = ["train_length=64", "model={dim: 32, layers: 2, heads: 4, kv_heads: 2}"]
    layout = MemoryLayout(4, False, 1, half=False, context=4)

    def numbers(position: str, length: int = 1024) -> float:
        model = make_model(load(*sizes, f"model.position={position}"), 50)
        return gathered_keys(model, length, layout) / (2 * 2 * 16 * 4)

    assert numbers("{name: rope}") == numbers("{name: rope, window: 10, sinks: 2}") == 1024 * 7 / 8
    assert numbers("{name: rope, window: 10}") == 18 + 256
    assert numbers("{name: rope, window: 10}", 16) == 14 + 4


@pytest.mark.parametrize("sequences", [8, 32, 1])
def test_suggested_size_is_the_largest_that_fits(sequences):
    settings = load(*SHAPE)
    model = meta_model(settings, 258)
    layout = replace(LAYOUT, sequences=100)
    needed = memory_estimate.memory(model, 64, replace(layout, sequences=sequences))
    free = sum(needed.values()) / 0.89
    assert f"micro_batch_size={sequences} (now 100" in fixes_for(model, settings, layout, free)


def test_a_run_that_does_not_fit_is_refused(overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "free_memory", lambda device: 1000)
    assert trained(*overrides, "--dry-run") == 1
    printed = capsys.readouterr()
    assert "measured" not in printed.out
    assert "will not fit: set" not in printed.out
    assert "will not fit" in printed.err
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: 1000)
    with pytest.raises(TrainingError, match="--force"):
        trained(*overrides, "--run-dir", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert trained(*overrides, "--force", "--run-dir", tmp_path / "x") == 0


def test_flops_are_those_of_each_length_and_recomputation():
    stages = "training.stages=[{length: 16, duration: 0.4}, {length: 64}]"
    settings = load(*SHAPE, "training.batch_size=4", "training.tokens=2560", stages)
    model = meta_model(settings, 258)
    flops = 1024 * model.flops_per_token(16) + 1536 * model.flops_per_token(64)
    assert dry_run.flops_of(model, settings.plan, LAYOUT) == pytest.approx(flops, rel=1e-12)
    again = dry_run.flops_of(model, settings.plan, replace(LAYOUT, checkpointing="full"))
    assert again == pytest.approx(4 / 3 * flops)


@pytest.mark.parametrize("seconds", [0.001, 0.25])
def test_time_is_that_of_measured_steps(overrides, monkeypatch, seconds):
    """Steps take `seconds` by a clock of the test; validations of 4 spans at 1, 2 and 4 × 24
    tokens take a third of the FLOPs of training on as many tokens."""
    now = [0.0]

    def step(state, *_):
        now[0] += seconds
        return SimpleNamespace(read=lambda: None)

    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: now[0])
    printed = []
    monkeypatch.setattr(dry_run, "duration", lambda total: printed.append(total) or "X")
    options = parse_options("", [*overrides, "training.validation.interval=null", "--dry-run"])
    with redirect_stdout(io.StringIO()):
        assert dry_run.dry_run(options, SimpleNamespace(), step) == 0
    model = meta_model(load_settings(RunSettings, overrides), 258)
    tokens = [n * model.flops_per_token(n) for n in (24, 48, 96)]
    validation = 4 * sum(tokens) / 3 / (8 * tokens[0])
    assert printed == [pytest.approx(seconds * (12 + validation))]


@pytest.mark.parametrize(
    "name", ["quickstart", "studies/mup_base", "studies/hybrids_base", "studies/schemes_base"]
)
def test_published_configurations_do_not_depend_on_the_processor(name):
    assert load(str(CONFIGS / f"{name}.yaml")).training.precision == "float32"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("Tesla T4", None),  # no bfloat16
    ],
)
def test_peaks_of_gpus_by_the_names_that_torch_reports(name, peak, monkeypatch):
    """Dense products of bfloat16 in the vendors' data sheets, without sparsity."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert known_peak(torch.device("cuda")) == peak
