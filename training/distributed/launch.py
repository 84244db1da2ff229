"""Checks that a run has the processes and devices requested from its launcher.

accelerate 1.15 silently starts one process where `--cpu` or `use_cpu` requests several, and silently uses DDP
for an FSDP config on a CPU. The request is in the environment variables that accelerate sets and, on Linux,
in the command line of the parent process; the result is known once the process group is initialized.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from training.config.settings import TrainingSettings
from training.errors import TrainingError

MEND = (
    "accelerate launch --config_file configs/accelerate/cpu.yaml --num_processes {n} train.py ..., with "
    "one_node.yaml on GPUs"
)
# Task counts of launchers that do not configure torch: each process would train alone.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class LauncherRequest:
    """What was requested from accelerate; None where unknown."""

    processes: int | None = None  # on all machines
    accumulation: int | None = None  # backward passes per step


def parent_words() -> list[str]:
    """The command line of the parent process; [] where the system does not provide it."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in raw.split(b"\0")[:-1]]


def asked_of_accelerate(words: Sequence[str]) -> LauncherRequest:
    """The request in an `accelerate launch` command line, including its config file; empty for any other
    command."""
    names = [Path(word).name for word in words]
    start = next(
        (
            i + 1
            for i, name in enumerate(names)
            if name in ("accelerate-launch", "accelerate.commands.launch")
            or (
                name == "launch"
                and i
                and names[i - 1] in ("accelerate", "accelerate.exe", "accelerate_cli.py")
            )
        ),
        None,
    )
    if start is None:
        return LauncherRequest()
    try:
        options = launch_command_parser().parse_args(list(words[start:]))
        processes = options.num_processes
        has_file = options.config_file is not None or (
            Path(default_config_file).is_file() and not options.cpu
        )
        if processes is None and has_file:
            processes = getattr(load_config_from_file(options.config_file), "num_processes", None)
    except (SystemExit, OSError, ValueError, TypeError, AttributeError):
        return LauncherRequest()  # this version of accelerate cannot parse it
    return LauncherRequest(processes, options.gradient_accumulation_steps)


def check_launch(t: TrainingSettings, environment: Mapping[str, str], asked: LauncherRequest) -> None:
    """Check that the launch matches the settings, before the process group is initialized.

    Raises TrainingError with the key of the accelerate config, the setting and the fix.
    """
    said = {name: value for name, value in environment.items() if value.lower() not in ("", "false", "no")}
    for name, what in (
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    ):
        if name in said:
            raise TrainingError(
                f"the accelerate config asks for {what}, not used here: take one of configs/accelerate"
            )
    _check_precision(t, environment.get("ACCELERATE_MIXED_PRECISION", "no"))
    if "ACCELERATE_DYNAMO_BACKEND" in said:
        raise TrainingError(
            f"the accelerate config asks for dynamo_backend {said['ACCELERATE_DYNAMO_BACKEND']}, and what is "
            "compiled is decided by training.compile: leave dynamo_config out, and set that"
        )
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(asked.accumulation or 1))
    if steps not in ("1", "auto"):
        raise TrainingError(
            f"accelerate was asked for gradient_accumulation_steps {steps}, and gradients are accumulated "
            "over as many passes as training.batch_size and training.micro_batch_size make: leave it out, "
            "and set those"
        )
    for axis in ("TP", "CP", "SP"):
        if environment.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1") != "1":
            raise TrainingError(
                f"the accelerate config asks for {axis.lower()}_size "
                f"{environment[f'PARALLELISM_CONFIG_{axis}_SIZE']}: only batches and weights are shared "
                "here; take one of configs/accelerate"
            )
    if asks_for_fsdp(environment):
        _check_fsdp(t, environment)


def asks_for_fsdp(environment: Mapping[str, str]) -> bool:
    """Whether the accelerate config enables FSDP."""
    return environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def _check_precision(t: TrainingSettings, mixed: str) -> None:
    bfloat16 = t.precision == "bfloat16" or (t.precision == "auto" and torch.cuda.is_available())
    if mixed != "no" and not (mixed == "bf16" and bfloat16):
        raise TrainingError(
            f"the accelerate config asks for mixed_precision {mixed}, and training.precision is "
            f"{t.precision}: precision is the run's, say mixed_precision: no there"
        )


def _check_fsdp(t: TrainingSettings, environment: Mapping[str, str]) -> None:
    p = t.parallel
    wrong = None
    if p.sharding == "none":
        wrong = "training.parallel.sharding is none: set it to auto or full, or take another config"
    elif (version := environment.get("FSDP_VERSION", "1")) != "2":
        wrong = f"fsdp_version is {version}: say fsdp_version: 2"
    elif environment.get("FSDP_RESHARD_AFTER_FORWARD", "true") not in ("true", "FULL_SHARD"):
        wrong = "fsdp_reshard_after_forward is not true: blocks are split again after each pass; say true"
    elif environment.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
        wrong = "fsdp_offload_params is true, which is not used here: leave it out"
    elif (
        environment.get("FSDP_ACTIVATION_CHECKPOINTING", "false") == "true" and not p.activation_checkpointing
    ):
        wrong = (
            "fsdp_activation_checkpointing is true, and training.parallel.activation_checkpointing decides "
            "that and is false: set it to true, or leave the other out"
        )
    if wrong:
        raise TrainingError(f"the accelerate config asks for FSDP, but {wrong}")


def check_world(
    t: TrainingSettings, environment: Mapping[str, str], asked: LauncherRequest, world: int
) -> None:
    """Check that the run has the requested number of processes. `world`: the actual number.

    Raises TrainingError with a command that works.
    """
    wanted = t.parallel.processes
    if wanted is not None and wanted != world:
        raise TrainingError(
            f"training.parallel.processes is {wanted} and {_runs(world)}: start it with "
            f"{MEND.format(n=wanted)}; or change the setting"
        )
    if asked.processes is not None and asked.processes not in (-1, world):
        raise TrainingError(
            f"accelerate was asked for {asked.processes} processes and {_runs(world)}; without GPUs it does "
            f"so silently for --cpu and use_cpu. This works: {MEND.format(n=asked.processes)}"
        )
    # If the parent's command line is not available: accelerate's launcher for a single process sets a port
    # only if several processes were requested.
    alone = "WORLD_SIZE" not in environment
    if alone and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise TrainingError(
            f"accelerate was asked for several processes and {_runs(world)}; without GPUs it does so "
            f"silently for --cpu and use_cpu. This works: {MEND.format(n='N')}. For one "
            "process, unset MASTER_PORT"
        )
    groups = int(environment.get("GROUP_WORLD_SIZE", "1"))  # the number of torchrun agents
    for name in _TASKS:
        tasks = environment.get(name, "1")
        if tasks.isdigit() and int(tasks) > 1 and int(tasks) not in (groups, world):
            raise TrainingError(
                f"{name} says that {tasks} tasks were started, and this one knows of {groups - 1 or 'no'} "
                "other: each would train the same run by itself. Start one launcher a node, as "
                "scripts/launch does"
            )


def _runs(world: int) -> str:
    return "one runs" if world == 1 else f"{world} run"


def check_devices(environment: Mapping[str, str], gpus: int) -> None:
    """Check that this machine has no more processes than GPUs (if any), before they would hang."""
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    on_cpu = environment.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    if gpus and not on_cpu and local > gpus:
        raise TrainingError(
            f"{local} processes were started on a machine with {gpus} GPU{'s' if gpus > 1 else ''}: start "
            f"{gpus} on each, or set ACCELERATE_USE_CPU=true to train on its CPUs"
        )
