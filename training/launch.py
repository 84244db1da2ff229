"""Checks that the launcher, the settings and the processes that run agree.

accelerate 1.15 silently starts one process even if `--cpu` or `use_cpu` requests several, and
silently uses DDP for an FSDP config on a CPU. The request is in accelerate's environment variables;
the actual processes are known once the process group is initialized.
"""

from collections.abc import Mapping

import torch

from errors import TrainingError
from run_directory.training_settings import TrainingSettings

COMMAND = (
    "accelerate launch --config_file configs/accelerate/cpu.yaml --num_processes {n} train.py ... "
    "(one_node.yaml on GPUs)"
)
# Environment variables of the accelerate config: the values that are supported, and the fix.
_OFF = ("", "0", "no", "false")
_REPLACED = "remove it; training.parallel.context replaces it"
_ALLOWED = {
    "ACCELERATE_USE_DEEPSPEED": (_OFF, "use one of configs/accelerate"),
    "ACCELERATE_USE_MEGATRON_LM": (_OFF, "use one of configs/accelerate"),
    "ACCELERATE_DYNAMO_BACKEND": (_OFF, "remove it; training.compile replaces it"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("", "1", "auto"),
        "remove it; training.micro_batch_size replaces it",
    ),
    "PARALLELISM_CONFIG_TP_SIZE": (("", "1"), "remove it"),
    "PARALLELISM_CONFIG_CP_SIZE": (("", "1"), _REPLACED),
    "PARALLELISM_CONFIG_SP_SIZE": (("", "1"), _REPLACED),
}
_ALLOWED_WITH_FSDP = {
    "FSDP_VERSION": (("2",), "set it to 2"),
    "FSDP_RESHARD_AFTER_FORWARD": (("", "true", "full_shard"), "set it to true"),
    "FSDP_OFFLOAD_PARAMS": (_OFF, "remove it"),
}


def requests_fsdp(environment: Mapping[str, str]) -> bool:
    """Whether the accelerate config enables FSDP."""
    return environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_launch(t: TrainingSettings, environment: Mapping[str, str]) -> None:
    """Check the accelerate config against the settings, before the process group is initialized.

    Raises TrainingError with the option of the accelerate config and the fix.
    """
    is_fsdp = requests_fsdp(environment)
    allowed = _ALLOWED | _ALLOWED_WITH_FSDP if is_fsdp else dict(_ALLOWED)
    halves = {"bfloat16": {"bf16"}, "float16": {"fp16"}}
    if torch.cuda.is_available():
        halves["auto"] = {"bf16", "fp16"}
    allowed["ACCELERATE_MIXED_PRECISION"] = (
        ("", "no", *halves.get(t.precision, ())),
        f"training.precision is {t.precision}: set it to no",
    )
    if t.parallel.sharding == "none":
        fix = "set training.parallel.sharding to full"
        allowed["ACCELERATE_USE_FSDP"] = (_OFF, fix)
    if is_fsdp and not t.parallel.activation_checkpointing:
        fix = "set training.parallel.activation_checkpointing=true as well"
        allowed["FSDP_ACTIVATION_CHECKPOINTING"] = (_OFF, fix)
    for name, (values, fix) in allowed.items():
        value = environment.get(name, "")
        if value.lower() not in values:
            option = name.removeprefix("ACCELERATE_").removeprefix("PARALLELISM_CONFIG_").lower()
            raise TrainingError(f"accelerate config: {option} is {value}: {fix}")


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
