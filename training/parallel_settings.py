"""Settings of how a run is shared by processes. None of them shapes the weights beyond rounding."""

from typing import Literal

from training.settings_base import Settings, free


class ParallelSettings(Settings):
    """How processes share the run. How many there are is the launcher's business (configs/accelerate)."""

    processes: int | None = free(
        None,
        "processes the run is meant for, it refuses any other number; null: those that were started",
        ge=1,
    )
    sharding: Literal["auto", "none", "full"] = free(
        "auto",
        "none: every process holds the whole model (DDP); full: weights, gradients and moments are split "
        "over all of them (FSDP2); auto: full where the accelerate config says FSDP",
    )
    activation_checkpointing: bool = free(
        False,
        "keep only the input of each block and compute the rest again in the backward pass: memory for time",
    )
