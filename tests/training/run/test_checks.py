"""Invalid runs are rejected, and forecasts printed, before any compute."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from errors import TrainingError
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from training.checks import check_model
from training.hardware import peak_flops
from training.setup import run_facts

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
LEARNED = ["model.position.name=learned", "train_length=64"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.position.max_length=63"], "train_length 64 is longer than the 63 positions"),
        (
            ["model.position.max_length=127", "training.validation.multiples=[4,2]"],
            "begins at 2 × 64 .* 127",
        ),
    ],
)
def test_learned_table_shorter_than_lengths_is_rejected(overrides, message):
    with pytest.raises(TrainingError, match=message):
        check_model(load_settings(RunSettings, LEARNED + overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "checkpoint={interval: 100, keep_interval: 250}",
            r"keep_interval = 250: .* interval \(100\)",
        ),
        (
            "checkpoint={interval: 100, keep_interval: 50}",
            "keep_interval = 50: make it a multiple",
        ),
        ("checkpoint={interval: null, keep_interval: 50}", "set interval too"),
        ("profile.start=244", "profile.start = 244 is outside .* set 0 to 243"),
        ("checkpoint={interval: 50, keep_interval: 250}", None),
        ("profile={start: 243, steps: 3}", None),
    ],
)
def test_steps_beyond_the_run_are_rejected(overrides, message):
    with pytest.raises(TrainingError, match=message) if message else nullcontext():
        check_model(load_settings(RunSettings, [f"training.{overrides}"]))


def test_fork_profiles_its_own_steps_only():
    fork = ["parent={run: runs/x, fork: true, checkpoint: 100}"]
    for start, steps, is_late in ((97, 3, False), (98, 3, True), (100, 1, True)):
        overrides = [*fork, f"training.profile={{start: {start}, steps: {steps}}}"]
        with nullcontext() if is_late else pytest.raises(TrainingError, match="set 100 to 243"):
            check_model(load_settings(RunSettings, overrides))


@pytest.mark.parametrize(
    "overrides", [[], ["model.position.max_length=128", "training.validation.multiples=[2]"]]
)
def test_learned_table_covering_lengths_is_accepted(overrides):
    check_model(load_settings(RunSettings, LEARNED + overrides))


def test_machine_benchmark_keeps_rng_state():
    before = torch.get_rng_state()
    assert peak_flops(torch.device("cpu")) > 1e6
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "position").glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_suggested_scheme_fits_tiny_model(file):
    check_model(load_settings(RunSettings, [str(CONFIGS / "tiny.yaml"), str(file)]))


def test_manifest_lists_mixture_sources():
    settings = load_settings(RunSettings, [])
    model = SimpleNamespace(parameter_count=lambda: 1, vocab_size=258)
    found = []
    for others in ([], [SimpleNamespace(folder="more")]):
        hashes = {"hash": "h", "valid": SimpleNamespace(hash="v")}
        prepared = SimpleNamespace(folder="x", others=others, **hashes)
        found.append(run_facts(settings, prepared, model))  # type: ignore[arg-type]
    assert [manifest.get("mixture") for manifest in found] == [None, ["more"]]
