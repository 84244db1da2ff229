"""The processes that share one evaluation: who they are, and how their numbers come together."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evaluation.errors import EvaluationError

MEND = "torchrun --nproc_per_node N evaluate.py ..."
# Launchers that start several processes without telling torch: each would take itself to be alone.
_SILENT = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class Ranks:
    """This process among `world` that share an evaluation, `beside` of them on this machine; by default
    alone. Rank 0 writes and prints."""

    rank: int = 0
    world: int = 1
    local: int = 0
    beside: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def device(self, wanted: str) -> torch.device:
        """The device of this process: `auto` is a GPU where there is one, `cuda` this process's own."""
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cuda" and self.world > 1:
            return torch.device("cuda", self.local % torch.cuda.device_count())
        return torch.device(wanted)

    def collect(self, mine: Any) -> list[Any]:
        """What each process holds, in the order of ranks, on every process.

        Raises EvaluationError where another process has ended.
        """
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, mine)
        except RuntimeError as error:
            raise EvaluationError("another process of this evaluation has ended; see what it said") from error
        return found


def this_process() -> Ranks:
    """This process in the group that `joined` made."""
    if not dist.is_initialized():
        return Ranks()
    local, beside = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return Ranks(dist.get_rank(), dist.get_world_size(), local, beside or dist.get_world_size())


@contextmanager
def joined() -> Iterator[Ranks]:
    """The group of the processes that a launcher started, for as long as this lasts; alone without one.

    Only losses travel, so that the group is one of CPUs also where the models are on GPUs.
    Raises EvaluationError where several processes were asked for and this one knows of no other.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        refuse_silent_launch(os.environ)
        yield Ranks()
        return
    # A rank that has done its share of a cell waits for the slowest.
    dist.init_process_group("gloo", timeout=timedelta(hours=24))
    try:
        yield this_process()
    finally:
        dist.destroy_process_group()


def refuse_silent_launch(environment: Mapping[str, str]) -> None:
    """Raises EvaluationError where a launcher was asked for several processes and did not connect them."""
    if "WORLD_SIZE" in environment:
        return
    # `accelerate launch` on a CPU starts one process whatever --num_processes says; the port gives it away.
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment:
        raise EvaluationError(
            f"several processes were asked for and one was started: on a CPU use {MEND}, or "
            "`accelerate launch --multi_gpu` with ACCELERATE_USE_CPU=true; for one process, leave "
            "--num_processes away and unset MASTER_PORT"
        )
    for name in _SILENT:
        if environment.get(name, "1").isdigit() and int(environment.get(name, "1")) > 1:
            raise EvaluationError(
                f"{name} says {environment[name]} processes, and they do not know of each other: all would "
                f"measure and write the same; use {MEND}, or one task"
            )
