"""Checks that the launcher, the settings and the processes that run agree.

accelerate 1.15 silently starts one process where `--cpu` or `use_cpu` requests several, and
silently uses DDP for an FSDP config on a CPU. The request is in its environment variables; the
result is known once the process group is initialized.
"""

from collections.abc import Mapping

import torch

from errors import TrainingError
from run_directory.training_settings import TrainingSettings

COMMAND = (
    "accelerate launch --config_file configs/accelerate/cpu.yaml --num_processes {n} train.py ... "
    "(one_node.yaml on GPUs)"
)
# Task counts of launchers that do not configure torch: each process would train alone.
_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def requests_fsdp(environment: Mapping[str, str]) -> bool:
    """Whether the accelerate config enables FSDP."""
    return environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_launch(t: TrainingSettings, environment: Mapping[str, str]) -> None:
    """Check the accelerate config against the settings, before the process group is initialized.

    Raises TrainingError with the key of the accelerate config, the setting and the fix.
    """

    def value(name: str, default: str) -> str:
        return environment.get(name, default).lower()

    is_off = ("", "false", "no")
    bfloat16 = t.precision == "bfloat16" or (t.precision == "auto" and torch.cuda.is_available())
    mixed = value("ACCELERATE_MIXED_PRECISION", "no")
    steps = value("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    replaced = "remove it; training.parallel.context replaces it"
    # what is wrong, and the message
    checks = [
        (
            value(f"ACCELERATE_USE_{name}", "") not in is_off,
            f"{name} is not supported: use one of configs/accelerate",
        )
        for name in ("DEEPSPEED", "MEGATRON_LM")
    ]
    checks += [
        (
            mixed != "no" and not (mixed == "bf16" and bfloat16),
            f"mixed_precision is {mixed}, but training.precision is {t.precision}: set "
            "mixed_precision: no",
        ),
        (
            value("ACCELERATE_DYNAMO_BACKEND", "") not in is_off,
            "remove dynamo_config; training.compile replaces it",
        ),
        (
            steps not in ("1", "auto"),
            f"gradient_accumulation_steps is {steps}: remove it; training.micro_batch_size "
            "replaces it",
        ),
    ]
    for axis, fix in (("tp", "remove it"), ("cp", replaced), ("sp", replaced)):
        size = value(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", "1")
        checks.append((size != "1", f"{axis}_size is {size}: {fix}"))
    if requests_fsdp(environment):
        version = value("FSDP_VERSION", "1")
        reshard = value("FSDP_RESHARD_AFTER_FORWARD", "true")
        recomputes = value("FSDP_ACTIVATION_CHECKPOINTING", "false") == "true"
        checks += [
            (
                t.parallel.sharding == "none",
                "FSDP contradicts training.parallel.sharding none: set it to full",
            ),
            (version != "2", f"fsdp_version is {version}: set it to 2"),
            (
                reshard not in ("true", "full_shard"),
                f"fsdp_reshard_after_forward is {reshard}: set it to true",
            ),
            (
                value("FSDP_OFFLOAD_PARAMS", "false") == "true",
                "fsdp_offload_params is not supported: remove it",
            ),
            (
                recomputes and not t.parallel.activation_checkpointing,
                "fsdp_activation_checkpointing requires "
                "training.parallel.activation_checkpointing=true",
            ),
        ]
    for is_wrong, problem in checks:
        if is_wrong:
            raise TrainingError(f"accelerate config: {problem}")


def check_devices(environment: Mapping[str, str], gpus: int) -> None:
    """Check that this machine has no more processes than GPUs (if any), before they would hang."""
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    on_cpu = environment.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    if gpus and not on_cpu and local > gpus:
        raise TrainingError(
            f"{local} processes were started on a machine with {gpus} GPU(s): start {gpus} per "
            "machine, or set ACCELERATE_USE_CPU=true to train on CPUs"
        )


def check_world(t: TrainingSettings, environment: Mapping[str, str], world: int) -> None:
    """Check that the run has the requested number of processes, and that context groups divide it.
    `world`: the actual number.

    Raises TrainingError with a command that works.
    """
    wanted = t.parallel.processes
    context = t.parallel.context
    if wanted is not None and wanted != world:
        raise TrainingError(
            f"training.parallel.processes is {wanted}, but the number of processes is {world}. "
            f"Start them with {COMMAND.format(n=wanted)}, or change the setting"
        )
    if world % context:
        raise TrainingError(
            f"training.parallel.context = {context} does not divide the number of processes, "
            f"{world}. Start {COMMAND.format(n=-(-world // context) * context)}, or change the "
            "setting"
        )
    # accelerate's launcher of a single process sets a port only if several processes were
    # requested.
    request = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}
    if "WORLD_SIZE" not in environment and request <= environment.keys():
        raise TrainingError(
            "accelerate started one process although several were requested (or MASTER_PORT is "
            f"set), as it does for --cpu without GPUs. Start {COMMAND.format(n='N')}, or unset "
            "MASTER_PORT"
        )
    groups = int(environment.get("GROUP_WORLD_SIZE", "1"))  # the number of torchrun agents
    for name in _TASK_COUNTS:
        tasks = environment.get(name, "1")
        if tasks.isdigit() and int(tasks) > 1 and int(tasks) not in (groups, world):
            raise TrainingError(
                f"{name} is {tasks}, but the process group has {groups} launcher(s) and {world} "
                "process(es): each task would train the same run alone. Start one launcher per "
                "node, as in scripts/launch"
            )
