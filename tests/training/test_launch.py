"""The launcher's environment against the settings and the processes that run."""

import shlex
from contextlib import nullcontext

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from errors import ModelError, TrainingError
from model import find_device
from run_directory.training_settings import TrainingSettings
from tests.files import ROOT
from tests.training.conftest import REFUSED
from training.launch import check_devices, check_launch, check_world

CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
PLAIN = TrainingSettings()


def passes(message: str | None):
    """Expects a TrainingError with this message; None: no error."""
    return pytest.raises(TrainingError, match=message) if message else nullcontext()


@pytest.mark.parametrize(
    ("environment", "settings", "world", "message"),
    REFUSED["processes"],
)
def test_a_run_has_the_requested_processes(environment, settings, world, message):
    with passes(message):
        t = TrainingSettings.model_validate({"parallel": settings})
        check_world(t, environment, world)


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    REFUSED["accelerate"],
)
def test_an_accelerate_config_agrees_with_the_settings(environment, settings, message):
    with passes(message):
        check_launch(TrainingSettings.model_validate(settings), environment)


def test_more_processes_than_gpus_are_rejected():
    with pytest.raises(TrainingError, match=r"4 processes .* 2 GPU"):
        check_devices({"LOCAL_WORLD_SIZE": "4"}, 2)
    check_devices({"LOCAL_WORLD_SIZE": "4"}, 0)
    check_devices({"LOCAL_WORLD_SIZE": "2"}, 2)
    check_devices({"LOCAL_WORLD_SIZE": "4", "ACCELERATE_USE_CPU": "true"}, 2)


def environment_of(overrides: list[str]) -> tuple[dict[str, str], int]:
    """The environment that accelerate's launcher sets for a command line, and the processes it
    starts."""
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(overrides))
    if options.multi_gpu or options.use_fsdp:
        environment = prepare_multi_gpu_env(options)  # sets nproc_per_node
        started = int(options.nproc_per_node) * options.num_machines
        return environment | {"WORLD_SIZE": str(started)}, started
    return prepare_simple_launcher_cmd_env(options)[1], 1


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_accelerate_configs_pass_checks(file):
    """With the command line that the first comment of the file gives."""
    text = file.read_text()
    name = f"configs/accelerate/{file.name}"
    assert text.startswith(f"# accelerate launch --config_file {name}")
    command = text[2:].partition("train.py")[0].replace("\\\n#", "")
    for word, value in (
        (name, str(file)),
        (" R ", " 0 "),
        ("HOST", "127.0.0.1"),
        ("29500", "0"),
    ):
        command = command.replace(word, value)
    environment, started = environment_of([*shlex.split(command)[2:], "train.py"])
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "no"
    used = {"WORLD_SIZE": str(started)}
    for key, value in environment.items():
        if key.startswith(("ACCELERATE", "FSDP", "PARALLELISM")):
            used[key] = value
    check_launch(PLAIN, used)
    check_world(PLAIN, used, started)
    assert ("ACCELERATE_USE_FSDP" in used) == ("fsdp" in file.stem)


@pytest.mark.parametrize(
    ("name", "gpus", "local_rank", "expected"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 2, 0, "cuda:0"),
        ("auto", 2, 3, "cuda:1"),
        ("cuda", 2, 1, "cuda:1"),
        ("cuda:0", 2, 1, "cuda:0"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_each_local_process_has_a_gpu_of_its_own(name, gpus, local_rank, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("model.devices.torch.empty", lambda size, device: None)
    assert find_device(name, local_rank) == torch.device(expected)


def test_a_device_without_float64_is_refused(monkeypatch):
    monkeypatch.setattr("model.devices.torch.empty", lambda size, device: None)
    with pytest.raises(ModelError, match=r"mps .* float64"):
        find_device("mps")
