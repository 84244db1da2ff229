"""The processes that share one evaluation, and how their results are gathered."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from errors import EvaluationError
from model import ContextShard, find_device

LAUNCH = "torchrun --nproc_per_node N evaluate.py ..."
OTHER_ENDED = "another process of this evaluation has ended; see its error message"
PATIENCE = timedelta(hours=24)
# Ranks of a context group wait for each other in every layer, first while another one loads its
# model.
GATHER_TIMEOUT = timedelta(minutes=30)
# Launchers that start several processes without setting WORLD_SIZE: each would run alone.
_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class EvaluationRanks:
    """This process among the `world` processes of an evaluation, `local_world` of them on this
    machine; by default the only one. Rank 0 writes and prints.

    Attributes:
        shard: the part of each window that this process reads, if the ranks of a group share
            windows.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    shard: ContextShard | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def device(self, wanted: str) -> torch.device:
        """The device of this process: `auto` is a GPU if there is one, `cuda` is the GPU of this
        rank.

        Raises EvaluationError if processes that share windows would use the same GPU, which NCCL
        does not support.
        """
        device = find_device(wanted, self.local_rank)
        gpus = torch.cuda.device_count()
        if self.shard is not None and device.type == "cuda" and self.local_world > gpus:
            raise EvaluationError(
                f"{self.local_world} processes share windows on a machine with {gpus} GPU(s): "
                f"start {gpus} per machine, or set device=cpu"
            )
        return device

    def from_main(self, read: Callable[[], Any]) -> Any:
        """The value that `read` returns on rank 0, on every process."""
        return self.collect(read() if self.main else None)[0]

    def collect(self, mine: Any) -> list[Any]:
        """Gather a value from every process, in the order of ranks, on every process.

        Raises EvaluationError if another process has ended.
        """
        if self.world == 1:
            return [mine]
        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, mine)
        except RuntimeError as error:
            raise EvaluationError(OTHER_ENDED) from error
        return values


def lost_process(error: Exception) -> EvaluationError:
    """The user error for a failed collective of a context group that lost a process."""
    if "timed out" not in str(error).lower():
        return EvaluationError(OTHER_ENDED)
    seconds = GATHER_TIMEOUT.total_seconds()
    return EvaluationError(
        f"another process of this evaluation has not answered within {seconds:g} s: it hangs. End "
        "that process and run the same command again to continue"
    )


@contextmanager
def joined(context: int = 1) -> Iterator[EvaluationRanks]:
    """Join the process group of a launcher for the duration of the context; a single process
    without one.

    Losses are exchanged by gloo on the CPU, even if the models are on GPUs. Keys and values of
    windows that `context` processes share are exchanged by NCCL if there are GPUs.

    Raises EvaluationError if several processes are not connected, or if `context` does not divide
    the number of processes.
    """
    refuse_silent_launch(os.environ)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % context:
        fix = LAUNCH.replace("N", str(-(-world // context) * context))
        raise EvaluationError(
            f"context = {context} does not divide the number of processes, {world}. Start {fix}, "
            "or change the setting"
        )
    if world == 1:
        yield EvaluationRanks()
        return
    has_gpus = context > 1 and torch.cuda.is_available()
    # A rank that has finished its share of a cell waits for the slowest rank.
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout=PATIENCE)
    try:
        rank = dist.get_rank()
        shard = None
        if context > 1:  # all processes create all groups of neighbors
            groups = [
                dist.new_group([*range(start, start + context)], timeout=GATHER_TIMEOUT)
                for start in range(0, world, context)
            ]
            own = groups[rank // context]
            assert isinstance(own, dist.ProcessGroup)
            shard = ContextShard.of(own)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        yield EvaluationRanks(rank, world, local_rank, local_world, shard)
        dist.barrier()  # a rank that exits while another one still sends would abort that one
    finally:
        dist.destroy_process_group()


def refuse_silent_launch(environment: Mapping[str, str]) -> None:
    """Raise EvaluationError if a launcher started several processes without connecting them."""
    for name in _TASK_COUNTS:
        if "WORLD_SIZE" not in environment and environment.get(name, "1") not in ("", "1"):
            raise EvaluationError(
                f"{name}={environment[name]}, but the processes are not connected: all would "
                f"measure and write the same; use {LAUNCH}, or a single task"
            )
