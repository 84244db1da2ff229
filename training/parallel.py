"""The processes that share a run: who they are, what each holds, and how their numbers come together.

accelerate launches them, finds their devices, brings them together and wraps the model for DDP. Sharding is
torch's own `fully_shard` on CPUs and GPUs alike: on a CPU accelerate has none, and one path that the tests
run on every machine is worth more than two of which one cannot be run on most.
"""

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.errors import TrainingError
from training.launch import asked_of_accelerate, check_devices, check_launch, check_world, parent_words
from training.settings import TrainingSettings


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
        patience = InitProcessGroupKwargs(timeout=timedelta(hours=24))
        self._accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), mixed_precision="no", kwargs_handlers=[patience]
        )
        self.settings = t.parallel
        self.device: torch.device = self._accelerator.device
        self.rank: int = self._accelerator.process_index
        self.world: int = self._accelerator.num_processes
        check_world(t, os.environ, asked, self.world)

    @property
    def main(self) -> bool:
        """Whether this process prepares, writes and speaks."""
        return self.rank == 0

    def main_first(self) -> AbstractContextManager:
        """The main process goes through the block before the others enter it."""
        return self._accelerator.main_process_first()

    def wait(self) -> None:
        """Go on once every process has come here."""
        self._accelerator.wait_for_everyone()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as training passes call it: its gradients are the mean over all processes."""
        return self._accelerator.prepare_model(model)

    def local(self, wrapped: nn.Module) -> AbstractContextManager:
        """Backward passes in the block leave their gradients with this process, for a later one to share."""
        return self._accelerator.no_sync(wrapped)

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
        if isinstance(norm, DTensor):  # of sharded gradients, each process has a part of the sum
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def end(self) -> None:
        """Part from the other processes."""
        self._accelerator.end_training()
