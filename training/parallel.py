"""The processes that share a run: who they are, what each holds, and how their numbers come together.

accelerate launches them, finds their devices, brings them together and wraps the model for DDP. Sharding is
torch's own `fully_shard` on CPUs and GPUs alike: on a CPU accelerate has none, and one path that the tests
run on every machine is worth more than two of which one cannot be run on most.
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
from torch.distributed.tensor import DTensor

from model import Transformer
from training.errors import TrainingError
from training.group import ALONE, PATIENCE, Apart, Group, as_one
from training.launch import (
    MEND,
    asked_of_accelerate,
    asks_for_fsdp,
    check_devices,
    check_launch,
    check_world,
    parent_words,
)
from training.settings import TrainingSettings

T = TypeVar("T")


class Parallel:
    """This process among those of a run.

    Raises TrainingError where the launcher and the settings ask for different things, or where the run did
    not get what either asked for.
    """

    def __init__(self, t: TrainingSettings):
        asked = asked_of_accelerate(parent_words())
        check_launch(t, os.environ, asked)
        check_devices(os.environ, torch.cuda.device_count())
        # The main process prepares and validates while the others wait, by default for ten minutes only.
        patience = InitProcessGroupKwargs(timeout=PATIENCE)
        self._accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), mixed_precision="no", kwargs_handlers=[patience]
        )
        self.settings = t.parallel
        self.device: torch.device = self._accelerator.device
        self.rank: int = self._accelerator.process_index
        self.world: int = self._accelerator.num_processes
        check_world(t, os.environ, asked, self.world)
        wanted = "full" if asks_for_fsdp(os.environ) else "none"
        self.sharded: bool = (wanted if t.parallel.sharding == "auto" else t.parallel.sharding) == "full"
        if self.sharded and not dist.is_initialized():
            raise TrainingError(
                "training.parallel.sharding is full, and there is no other process to share the weights "
                f"with: start {MEND.format(n='N')}, or leave it out"
            )
        # The processes that hold the model, as they hear of each other when they save it; and all of them,
        # where one holds it and the others are to hear of that.
        self.holders: Group = Apart(self.rank, self.world) if self.sharded else ALONE
        self.listeners: Group = ALONE if self.sharded else self

    @property
    def main(self) -> bool:
        """Whether this process prepares, writes and speaks."""
        return self.rank == 0

    @property
    def takes_part(self) -> bool:
        """Whether the model cannot be evaluated or saved without this process."""
        return self.main or self.sharded

    def main_first(self, work: Callable[[], T]) -> T:
        """What `work()` gives each process; the others begin once the main one has it.

        Raises TrainingError on the others where it failed on the main one.
        """
        found: list[T] = []
        with as_one(self, "begin"):
            if self.main:
                found.append(work())
        return found[0] if self.main else work()

    def wait(self) -> None:
        """Go on once every process has come here."""
        self._accelerator.wait_for_everyone()

    def wrap(
        self, model: Transformer, *, compiled: bool = False, autocast: torch.dtype | None = None
    ) -> nn.Module:
        """The model as training passes call it: its gradients are the mean over all processes.

        A sharded model is changed in place: its parameters become DTensors, so that optimizers are made after
        this. It must then be called by every process alike, also to evaluate it.
        """
        if self.settings.activation_checkpointing:
            model.recompute_blocks()
        if compiled:  # hooks around blocks would cut a whole graph to pieces, and it could not recompute them
            model.compile(by_block=self.sharded or self.settings.activation_checkpointing, dynamic=True)
        if not self.sharded:
            return self._accelerator.prepare_model(model)
        shard(model, self.device, self.world, autocast)
        return model

    def local(self, wrapped: nn.Module) -> AbstractContextManager:
        """Backward passes in the block leave their gradients with this process, for a later one to share.

        Not where the model is sharded: whole gradients would take the memory that sharding is there to save.
        """
        return nullcontext() if self.sharded else self._accelerator.no_sync(wrapped)

    def settle(self, model: nn.Module) -> None:
        """Let go of the whole weights that an evaluation has left gathered; parameters are shards again."""
        if isinstance(model, FSDPModule):
            model.reshard()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes, on each of them."""
        shared = self._accelerator.reduce(x, reduction="sum")
        assert isinstance(shared, Tensor)
        return shared

    def gather(self, value: Any) -> list[Any]:
        """What each process holds, by rank, on all of them; host values, so not for use inside a step."""
        found: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found

    def agree(self, value: Any, what: str, mend: str) -> None:
        """Raises TrainingError, on every process, where `value` is not the same on all of them."""
        found = self.gather(value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise TrainingError(
                    f"{what} is {other} on process {rank} and {found[0]} on process 0: {mend}"
                )

    def clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to a global norm of `limit` where it is above; returns the norm before."""
        grads = [weight.grad for weight in parameters if weight.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if isinstance(norm, DTensor):  # of sharded gradients, whether it has been summed yet or not
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def state(self) -> dict[str, Any]:
        """What accelerate made of the launch, for the run's manifest."""
        found = self._accelerator.state
        return {
            "kind": found.distributed_type.value,
            "backend": found.backend,
            "precision": found.mixed_precision,
            "settings": self.settings.model_dump(mode="json"),
        }

    def end(self) -> None:
        """Part from the other processes."""
        self._accelerator.end_training()


def shard(model: Transformer, device: torch.device, world: int, autocast: torch.dtype | None) -> None:
    """Split weights, gradients and so moments over all processes, block by block (FSDP2).

    What lies around the blocks, positional schemes and tied embeddings among it, is one more group, gathered
    for the whole pass. Under bfloat16 autocast blocks are gathered in bfloat16, half the traffic; the
    residual stream, the rest of the model and every sum of gradients stay in float32, as without sharding.
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
