"""The launcher's environment against the settings and the processes that run."""

from __future__ import annotations

import shlex
from contextlib import nullcontext

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from errors import TrainingError
from run_directory.training_settings import TrainingSettings
from tests.training.conftest import ROOT
from training.launch import check_devices, check_launch, check_world

CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
PLAIN = TrainingSettings()
SIMPLE_LAUNCHER = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
# Two nodes, each with a launcher that knows of its own eight processes only.
NODES = {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}


def passes(message: str | None):
    """Expects a TrainingError with this message; None: no error."""
    return pytest.raises(TrainingError, match=message) if message else nullcontext()


@pytest.mark.parametrize(
    ("environment", "settings", "world", "message"),
    [
        ({}, {"processes": 2}, 1, "training.parallel.processes is 2.*--num_processes 2 train.py"),
        ({}, {"context": 4}, 6, "context = 4 .* --num_processes 8"),
        (SIMPLE_LAUNCHER, {}, 1, "--cpu.*cpu.yaml --num_processes N train.py.*MASTER_PORT"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, {}, 1, "SLURM_STEP_NUM_TASKS is 2"),
        (NODES, {}, 8, "SLURM_STEP_NUM_TASKS is 2"),
        ({}, {}, 1, None),
        ({"WORLD_SIZE": "2"}, {"processes": 2}, 2, None),
        (SIMPLE_LAUNCHER | {"WORLD_SIZE": "2"}, {}, 2, None),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, {}, 1, None),
        (NODES | {"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2"}, {}, 16, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, {}, 4, None),
    ],
)
def test_a_run_has_the_requested_processes(environment, settings, world, message):
    with passes(message):
        t = TrainingSettings.model_validate({"parallel": settings})
        check_world(t, environment, world)


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "is fp16.*training.precision is auto"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision": "float32"}, "bf16.*float32.*to no"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision": "bfloat16"}, None),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "training.compile"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {}, "is 4.*training.micro_batch_size"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "use_deepspeed"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, {}, "tp_size is 2"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, {}, "cp_size is 2.*training.parallel.context"),
        (
            FSDP,
            {"parallel": {"sharding": "none"}},
            "use_fsdp is true: set training.parallel.sharding",
        ),
        (FSDP | {"FSDP_VERSION": "1"}, {}, "fsdp_version is 1"),
        (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}, "fsdp_reshard_after_forward"),
        (
            FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {},
            "training.parallel.activation_checkpointing",
        ),
        (
            FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {"parallel": {"activation_checkpointing": True}},
            None,
        ),
    ],
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


def test_accelerate_requests_several_processes_on_a_cpu_and_starts_one(monkeypatch):
    """What `check_world` relies on, by accelerate's own launcher."""
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    environment, started = environment_of(["--cpu", "--num_processes", "2", "train.py"])
    with pytest.raises(TrainingError, match="--cpu"):
        check_world(PLAIN, environment, started)
    environment, started = environment_of(["--cpu", "--num_processes", "1", "train.py"])
    check_world(PLAIN, environment, started)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_accelerate_configs_pass_checks(file):
    text = file.read_text()
    assert text.startswith("# accelerate launch --config_file configs/accelerate/" + file.name)
    command = (
        text[2:]
        .split("train.py")[0]
        .replace("\\\n#", " ")
        .replace(str(file.relative_to(ROOT)), str(file))
    )
    overrides = shlex.split(command.replace(" R ", " 0 ").replace("HOST", "127.0.0.1"))
    overrides = [word for word in overrides if word != "29500"]
    if "--main_process_port" in overrides:
        overrides.insert(
            overrides.index("--main_process_port") + 1,
            "0" if "--num_machines" not in overrides else "29517",
        )
    environment, started = environment_of([*overrides[2:], "train.py"])
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "no" and config.distributed_type
    used = {
        k: v for k, v in environment.items() if k.startswith(("ACCELERATE", "FSDP", "PARALLELISM"))
    }
    check_launch(PLAIN, used)
    assert ("ACCELERATE_USE_FSDP" in used) == ("fsdp" in file.stem)
    check_world(PLAIN, used | {"WORLD_SIZE": str(started)}, started)
