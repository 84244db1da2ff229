"""What launchers are asked for, against the settings and against what came of it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from training import TrainingError
from training.config.settings import TrainingSettings
from training.distributed.launch import (
    LauncherRequest,
    asked_of_accelerate,
    check_devices,
    check_launch,
    check_world,
)

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
PLAIN = TrainingSettings()


def settings(**more) -> TrainingSettings:
    return TrainingSettings.model_validate(more)


@pytest.mark.parametrize(
    ("line", "processes"),
    [
        ("python -m accelerate.commands.launch --cpu --num_processes 2 train.py x.yaml", 2),
        ("/usr/bin/python3 /usr/bin/accelerate launch --multi_gpu --num_processes 8 train.py --run-dir y", 8),
        ("accelerate launch train.py --num_processes 3", None),  # a word for the script
        (f"accelerate launch --config_file {ROOT}/configs/accelerate/one_node.yaml train.py", 8),
        (
            f"accelerate launch --config_file {ROOT}/configs/accelerate/one_node.yaml --num_processes 4 t.py",
            4,
        ),
        ("accelerate launch --no_such_option 3 train.py", None),
        ("accelerate launch --config_file missing.yaml train.py", None),
        ("torchrun --nproc_per_node 2 train.py", None),
        ("bash launch accelerate", None),
        ("", None),
    ],
)
def test_the_number_asked_of_accelerate_is_read_from_its_command_line(line, processes, monkeypatch):
    monkeypatch.setattr("training.distributed.launch.default_config_file", "none.yaml")
    assert asked_of_accelerate(shlex.split(line)).processes == processes


def test_a_default_config_file_of_accelerate_counts(tmp_path, monkeypatch):
    file = tmp_path / "default_config.yaml"
    file.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 6\n")
    monkeypatch.setattr("training.distributed.launch.default_config_file", str(file))
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(file))
    assert asked_of_accelerate(["accelerate", "launch", "train.py"]).processes == 6


@pytest.mark.parametrize(
    ("environment", "asked", "wanted", "world", "words"),
    [
        ({}, LauncherRequest(2), None, 1, "asked for 2 processes and one runs.*cpu.yaml --num_processes 2"),
        ({"WORLD_SIZE": "4"}, LauncherRequest(5), None, 4, "asked for 5 processes and 4 run"),
        (
            {},
            LauncherRequest(),
            2,
            1,
            "training.parallel.processes is 2 and one runs.*--num_processes 2 train.py",
        ),
        ({"WORLD_SIZE": "2"}, LauncherRequest(2), 4, 2, "training.parallel.processes is 4 and 2 run"),
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            LauncherRequest(),
            None,
            1,
            "several processes and one runs",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "2"},
            LauncherRequest(),
            None,
            1,
            "SLURM_STEP_NUM_TASKS says that 2 .* no other",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, LauncherRequest(), None, 1, "OMPI_COMM_WORLD_SIZE says that 4"),
        # Two nodes, each with a launcher that knows of its own eight processes only.
        (
            {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"},
            LauncherRequest(8),
            None,
            8,
            "each would train the same run by itself",
        ),
    ],
)
def test_a_run_without_the_processes_it_asked_for_is_refused(environment, asked, wanted, world, words):
    with pytest.raises(TrainingError, match=words):
        check_world(settings(parallel={"processes": wanted}), environment, asked, world)


@pytest.mark.parametrize(
    ("environment", "asked", "wanted", "world"),
    [
        ({}, LauncherRequest(), None, 1),
        ({}, LauncherRequest(1), 1, 1),
        ({}, LauncherRequest(-1), None, 1),
        ({"WORLD_SIZE": "2"}, LauncherRequest(2), 2, 2),
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            LauncherRequest(),
            None,
            2,
        ),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, LauncherRequest(), None, 1),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2"},
            LauncherRequest(16),
            None,
            16,
        ),
        ({"SLURM_STEP_NUM_TASKS": "1"}, LauncherRequest(), None, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, LauncherRequest(), None, 4),
    ],
)
def test_a_run_with_the_processes_it_asked_for_may_start(environment, asked, wanted, world):
    check_world(settings(parallel={"processes": wanted}), environment, asked, world)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}


@pytest.mark.parametrize(
    ("environment", "more", "words"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "mixed_precision fp16, and training.precision is auto"),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            {"precision": "float32"},
            "bf16.*is float32.*mixed_precision: no",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision": "float64"}, "bf16.*is float64"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "training.compile"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {}, "steps 4.*training.micro_batch_size"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "Megatron"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, {}, "tp_size 2"),
        (FSDP, {"parallel": {"sharding": "none"}}, "training.parallel.sharding is none"),
        (FSDP | {"FSDP_VERSION": "1"}, {}, "fsdp_version is 1"),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, {}, "fsdp_offload_params"),
        (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}, "fsdp_reshard_after_forward"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "training.parallel.activation_checkpointing"),
    ],
)
def test_an_accelerate_config_that_contradicts_the_settings_is_refused(environment, more, words):
    with pytest.raises(TrainingError, match=words):
        check_launch(settings(**more), environment, LauncherRequest())


def test_accumulation_asked_on_the_command_line_is_refused_and_one_that_agrees_is_not():
    with pytest.raises(TrainingError, match="gradient_accumulation_steps 8"):
        check_launch(PLAIN, {}, LauncherRequest(accumulation=8))
    check_launch(PLAIN, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, LauncherRequest(accumulation=1))
    check_launch(settings(precision="bfloat16"), {"ACCELERATE_MIXED_PRECISION": "bf16"}, LauncherRequest())
    again = settings(parallel={"activation_checkpointing": True})
    check_launch(again, FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, LauncherRequest())


def test_more_processes_than_gpus_are_refused_before_they_wait_for_each_other():
    with pytest.raises(TrainingError, match=r"4 processes .* 2 GPUs: start 2"):
        check_devices({"LOCAL_WORLD_SIZE": "4"}, 2)
    check_devices({"LOCAL_WORLD_SIZE": "4"}, 0)
    check_devices({"LOCAL_WORLD_SIZE": "2"}, 2)
    check_devices({"LOCAL_WORLD_SIZE": "4", "ACCELERATE_USE_CPU": "true"}, 2)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_reads_our_configs_and_they_agree_with_the_checks(file, monkeypatch):
    """The environment that accelerate's own launcher makes of each."""
    from accelerate.commands.launch import _validate_launch_command

    text = file.read_text()
    assert text.startswith("# accelerate launch --config_file configs/accelerate/" + file.name)
    command = (
        text[2:].split("train.py")[0].replace("\\\n#", " ").replace(str(file.relative_to(ROOT)), str(file))
    )
    words = shlex.split(command.replace(" R ", " 0 ").replace("HOST", "127.0.0.1"))
    words = [word for word in words if word != "29500"]
    if "--main_process_port" in words:
        words.insert(
            words.index("--main_process_port") + 1, "0" if "--num_machines" not in words else "29517"
        )
    line = [*words, "train.py"]
    options, config, _ = _validate_launch_command(launch_command_parser().parse_args(line[2:]))
    assert config.mixed_precision == "no" and load_config_from_file(str(file)).distributed_type
    several = options.multi_gpu or options.use_fsdp
    environment = prepare_multi_gpu_env(options) if several else prepare_simple_launcher_cmd_env(options)[1]
    environment = {
        k: v for k, v in environment.items() if k.startswith(("ACCELERATE", "FSDP", "PARALLELISM"))
    }
    asked = asked_of_accelerate(line)
    assert asked.processes == options.num_processes
    check_launch(PLAIN, environment, asked)
    assert ("ACCELERATE_USE_FSDP" in environment) == ("fsdp" in file.stem)
    started = int(options.nproc_per_node) * options.num_machines if several else 1
    check_world(PLAIN, environment | {"WORLD_SIZE": str(started)}, asked, started)
