"""Distributed training: ranks, DDP or sharding of the model, context groups, and reductions.

accelerate launches the processes, chooses their devices and wraps the model for DDP. Sharding uses torch's
`fully_shard` on CPUs and GPUs: accelerate cannot shard on a CPU, and a single code path can be tested on any
machine.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from errors import TrainingError
from model import ContextShard, Transformer
from run_directory.training_settings import TrainingSettings
from training.distributed.error_barrier import (
    ALONE,
    PATIENCE,
    ProcessGroup,
    SideChannelGroup,
    error_barrier,
)
from training.distributed.launch import (
    COMMAND,
    check_context,
    check_devices,
    check_launch,
    check_world,
    requests_fsdp,
)

T = TypeVar("T")


class Parallel(ProcessGroup):
    """This process and the group of all processes of a run.

    Raises TrainingError where the launcher and the settings disagree, or the processes that run are not those
    that were requested.
    """

    def __init__(self, t: TrainingSettings):
        check_launch(t, os.environ)
        check_devices(os.environ, torch.cuda.device_count())
        # The main process prepares data while the others wait; the default timeout is ten minutes.
        patience = InitProcessGroupKwargs(timeout=PATIENCE)
        self._accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), mixed_precision="no", kwargs_handlers=[patience]
        )
        self.settings = t.parallel
        self.device: torch.device = self._accelerator.device
        self.rank: int = self._accelerator.process_index
        self.world: int = self._accelerator.num_processes
        check_world(t, os.environ, self.world)
        default = "full" if requests_fsdp(os.environ) else "none"
        self.sharded: bool = (
            default if t.parallel.sharding == "auto" else t.parallel.sharding
        ) == "full"
        if self.sharded and not dist.is_initialized():
            start = COMMAND.format(n="N")
            raise TrainingError(
                f"training.parallel.sharding=full requires several processes: start {start}"
            )
        self.shard: ContextShard | None = None
        if (size := t.parallel.context) > 1:
            check_context(size, self.world)
            # Ranks of a context group are neighbors, so that their collectives stay within a node.
            sizes = (self.world // size, size)
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("data", "context"))
            self.shard = ContextShard.of(mesh.get_group("context"))
        # Sharded: all processes save the model and report errors over `saving_group`. Otherwise the main
        # process saves it and reports errors to all processes over `error_group`.
        self.saving_group: ProcessGroup = (
            SideChannelGroup(self.rank, self.world) if self.sharded else ALONE
        )
        self.error_group: ProcessGroup = ALONE if self.sharded else self

    @property
    def main(self) -> bool:
        """Whether this process prepares data, writes files and prints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of the rows of a batch that this process shares with the others of its context group."""
        return self.rank // self.settings.context

    @property
    def data_world(self) -> int:
        """Number of context groups, which divide the rows of a batch."""
        return self.world // self.settings.context

    @property
    def takes_part(self) -> bool:
        """Whether this process is needed to evaluate or save the model."""
        return self.main or self.sharded

    def main_first(self, work: Callable[[], T]) -> T:
        """The result of `work()` on each process; the others start when the main one has finished.

        Raises TrainingError on the others where it failed on the main one.
        """
        found: list[T] = []
        with error_barrier(self, "begin"):
            if self.main:
                found.append(work())
        return found[0] if self.main else work()

    def wait(self) -> None:
        """Wait for all processes."""
        self._accelerator.wait_for_everyone()

    def wrap(
        self,
        model: Transformer,
        *,
        compiled: bool | None = False,
        autocast: torch.dtype | None = None,
    ) -> nn.Module:
        """The model for training passes, whose gradients are averaged over all processes.

        Args:
            compiled: compile the training pass; None: on a GPU.

        Sharding changes the model in place: its parameters become DTensors, so create optimizers afterwards,
        and call it on every process, also for evaluation.
        """
        checkpointing = self.settings.checkpointing
        model.checkpoint_blocks(checkpointing)
        if compiled is None:
            compiled = self.device.type == "cuda"
        if compiled:  # hooks around blocks break a whole-model graph
            model.compile(by_block=self.sharded or checkpointing != "none", dynamic=True)
        if not self.sharded:
            return self._replicate(model)
        shard(model, self.device, self.world, autocast)
        return model

    def _replicate(self, model: Transformer) -> nn.Module:
        """The model under DDP if there are several processes."""
        return self._accelerator.prepare_model(model)

    def no_sync(self, wrapped: nn.Module, enabled: bool = True) -> AbstractContextManager:
        """Accumulate gradients locally in the block, if `enabled`; a later backward pass reduces them.

        Sharded models always reduce: unsharded gradients would need the memory that sharding saves.
        """
        return nullcontext() if self.sharded or not enabled else self._accelerator.no_sync(wrapped)

    def reshard(self, model: nn.Module) -> None:
        """Free the unsharded weights that an evaluation has gathered."""
        if isinstance(model, FSDPModule):
            model.reshard()

    def sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes (all-reduce)."""
        shared = self._accelerator.reduce(x, reduction="sum")
        assert isinstance(shared, Tensor)
        return shared

    def gather(self, value: Any) -> list[Any]:
        """Gather a host value from all processes, by rank; synchronizes, so do not call it in a step."""
        found: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found

    def agree(self, value: Any, what: str, fix: str) -> None:
        """Raise TrainingError on every process where `value` differs between processes."""
        found = self.gather(value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise TrainingError(
                    f"{what} is {other} on process {rank} and {found[0]} on process 0: {fix}"
                )

    def state(self) -> dict[str, Any]:
        """The state of accelerate, for the run's manifest."""
        found = self._accelerator.state
        return {
            "kind": found.distributed_type.value,
            "backend": found.backend,
            "precision": found.mixed_precision,
            "settings": self.settings.model_dump(mode="json"),
        }

    def end(self) -> None:
        """Leave the process group once every process has finished; gloo aborts a process that still sends to
        one that has left."""
        self.wait()
        self._accelerator.end_training()


def shard(
    model: Transformer, device: torch.device, world: int, autocast: torch.dtype | None
) -> None:
    """Shard weights, gradients and optimizer state over all processes, block by block (FSDP2).

    The parameters outside the blocks, such as positional schemes and tied embeddings, form one more group,
    gathered for the whole pass. With bfloat16 autocast, blocks are gathered in bfloat16, which halves the
    traffic; the residual stream, the other parameters and gradient reductions stay in float32.
    """
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(
        param_dtype=autocast,
        reduce_dtype=None if autocast is None else torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
