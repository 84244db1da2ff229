"""Memory and time estimates of a run, and the suggestions for settings that are not enabled yet."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data.sampling.segments import Segment
from errors import TrainingError
from model import Transformer
from run_directory.console import Console
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from training import dry_run
from training import memory as memory_module
from training.dry_run import forecast
from training.memory import MemoryLayout, fitting, gathered_keys, memory

WORDS = [
    "data.tokenizer.name=bytes",
    "train_length=64",
    "model.dim=64",
    "model.heads=2",
    "model.layers=3",
]


@pytest.fixture
def settings() -> RunSettings:
    return load_settings(RunSettings, [*WORDS, "training.batch_size=8"])


def test_optimizer_state_memory(settings):
    with torch.device("meta"):
        model = Transformer(settings.model, 258, 64)
    p = model.parameter_count()
    for split, layout in (
        (1, MemoryLayout(1, False, 8, half=False, mean=True)),
        (4, MemoryLayout(4, True, 2, half=False, mean=True)),
    ):
        found = memory(model, 64, layout)
        assert [found[key] for key in ("weights", "gradients", "moments", "mean")] == [
            n * p / split for n in (4, 4, 8, 4)
        ]
    wide = memory(model, 64, MemoryLayout(1, False, 8, half=False, float_bytes=8))
    assert wide["weights"] == 8 * p and wide["mean"] == 0
    narrow = memory(model, 64, MemoryLayout(1, False, 8, half=False))
    assert wide["activations"] == 2 * narrow["activations"]


def test_step_time_with_recomputation_and_devices(settings):
    with torch.device("meta"):
        model = Transformer(settings.model, 258, 64)
    layouts = [
        MemoryLayout(1, False, 8),
        MemoryLayout(1, False, 8, checkpointing="full"),
        MemoryLayout(4, True, 2),
    ]
    one, again, four = (forecast(model, 64, settings.plan, layout, peak=1e12) for layout in layouts)
    assert one.seconds == pytest.approx(one.tokens * one.flops_per_token / 0.45e12)
    assert again.seconds == pytest.approx(4 / 3 * one.seconds) and four.seconds == pytest.approx(
        one.seconds / 4
    )


def test_flops_of_stages_are_those_of_their_own_lengths():
    settings = load_settings(
        RunSettings,
        [
            *WORDS,
            "training.batch_size=4",
            "training.tokens=2560",
            "training.stages=[{length: 16, duration: 0.4}, {length: 64}]",
        ],
    )
    with torch.device("meta"):
        model = Transformer(settings.model, 258, 64)
    expected = forecast(model, 64, settings.plan, MemoryLayout(1, False, 4), peak=1.0)
    flops = 1024 * model.flops_per_token(16) + 1536 * model.flops_per_token(64)
    assert expected.flops_per_token == pytest.approx(flops / 2560, rel=1e-12)
    assert expected.flops_per_token < 0.999 * model.flops_per_token(64)


@pytest.mark.parametrize(
    ("overrides", "sharded", "message", "unsaid"),
    [
        ([], False, ["activation_checkpointing", "sharding=full"], "more devices"),
        (
            ["training.micro_batch_size=1"],
            False,
            ["activation_checkpointing", "sharding=full"],
            "micro_batch_size",
        ),
        (
            ["training.parallel.activation_checkpointing=true"],
            True,
            ["take more devices"],
            "checkpointing",
        ),
    ],
)
def test_suggestions_exclude_enabled_settings(
    settings, monkeypatch, capsys, overrides, sharded, message, unsaid
):
    settings = load_settings(RunSettings, [*WORDS, "training.batch_size=8", *overrides])
    monkeypatch.setattr(dry_run, "free_memory", lambda device: 1000)
    monkeypatch.setattr(dry_run, "peak_flops", lambda *device: 1e12)
    here = SimpleNamespace(
        world=2,
        data_world=2,
        sharded=sharded,
        device=torch.device("cpu"),
        device_type="cpu",
        autocast_dtype=None,
        main=True,
    )
    assert dry_run.show_forecast(settings, here, Console()) == 1  # type: ignore[arg-type]
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "will not fit" in line]
    assert all(overrides in warning for overrides in message) and unsaid not in warning
    here.main = False  # the others leave the telling to the main process
    assert dry_run.show_forecast(settings, here, Console()) == 0  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_suggested_sizes_are_the_largest_that_fit(settings):
    with torch.device("meta"):
        model = Transformer(settings.model, 258, 64)
    layout = MemoryLayout(1, False, 100, half=False, device="cpu", step_sequences=100)

    def needed(sequences: int, step: int = 100) -> float:
        sizes = replace(layout, sequences=sequences, step_sequences=step)
        return sum(memory(model, 64, sizes).values())

    assert fitting(model, 64, layout, needed(8) / 0.89) == (8, 100)
    assert fitting(model, 64, layout, 0.99 * needed(16) / 0.9) == (8, 100)
    assert fitting(model, 64, layout, 1e12) == (64, 100)
    assert fitting(model, 64, layout, 0) is None
    huge = replace(layout, step_sequences=1 << 30)  # not even one sequence per pass fits
    assert fitting(model, 64, huge, needed(1, 1 << 20) / 0.89) == (1, 1 << 20)


def test_memory_check_uses_smallest_rank(settings, monkeypatch):
    there = SimpleNamespace(
        world=2,
        data_world=2,
        sharded=False,
        device=torch.device("cpu"),
        device_type="cpu",
        autocast_dtype=None,
        gather=lambda free: [free, 99],
    )
    monkeypatch.setattr(memory_module, "free_memory", lambda device: 1 << 40)
    with pytest.raises(TrainingError, match=r"99 bytes|0 MiB are free.*--force"):
        memory_module.check_memory(settings, there)  # type: ignore[arg-type]
    there.gather = lambda free: [free]
    memory_module.check_memory(settings, there)  # type: ignore[arg-type]


def test_remaining_work_of_plan():
    plan = [Segment(5, 4, 3), Segment(13, 2, 2)]
    left = [dry_run.after(plan, done) for done in range(6)]
    assert left == [plan, [(5, 4, 2), plan[1]], [(5, 4, 1), plan[1]], [plan[1]], [(13, 2, 1)], []]


def test_gathered_keys_of_layers_with_a_window():
    """In float32, per layer, 2 × 16 numbers per token: at most the 2 · 9 tokens before two chunks,
    and half of the tokens in one of two layers."""
    shape = [
        "train_length=64",
        "model.dim=32",
        "model.layers=2",
        "model.heads=4",
        "model.kv_heads=2",
    ]
    layout = MemoryLayout(4, False, 1, half=False, context=4)

    def numbers(position: str, length: int = 1024) -> float:
        settings = load_settings(RunSettings, [*shape, f"model.position={position}"])
        return gathered_keys(Transformer(settings.model, 50, 64), length, layout) / (2 * 2 * 16 * 4)

    assert numbers("{name: rope}") == numbers("{name: rope, window: 10, sinks: 2}") == 1024 * 7 / 8
    assert numbers("{name: rope, window: 10}") == 18 + 256
    assert numbers("{name: rope, window: 10}", 16) == 14 + 4
