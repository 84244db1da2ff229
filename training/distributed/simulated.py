"""Rank 0 of processes that do not exist, and a counter of collectives: `train.py --dry-run --world N`.

torch's fake process group performs no communication. With fake tensors, which have shapes but no data, the
training step of any model runs on one CPU.
"""

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from errors import TrainingError
from model import Transformer
from run_directory.training_settings import TrainingSettings
from training.distributed.parallel import Parallel

_OPERATIONS = {
    "all-gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-reduce": ("allreduce_", "all_reduce"),
    "all-to-all": ("alltoall_base_", "all_to_all_single"),
}
_LOCAL = "wait_tensor", "_wrap_tensor_autograd"  # operations that communicate nothing
_NAMES = {operation: name for name, operations in _OPERATIONS.items() for operation in operations}


class SimulatedParallel(Parallel):
    """Process 0 of `world` processes that share no data. Tensors are on the CPU.

    Raises TrainingError if this process is one of several, and as Parallel does.
    """

    def __init__(self, t: TrainingSettings, world: int):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise TrainingError(
                "--world simulates the processes: run it in one process, without a launcher"
            )
        launch = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        launch |= {
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_TORCH_DEVICE": "cpu",
            "OMP_NUM_THREADS": 1,
        }
        # Read by accelerate, which uses a process group that is initialized.
        os.environ.update({name: str(value) for name, value in launch.items()})
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        super().__init__(t)

    def _replicate(self, model: Transformer) -> nn.Module:
        # DDP compares and copies weights when it is created, and the fake group returns no result of the
        # default communication hook.
        replica = DistributedDataParallel(model, init_sync=False)
        replica.register_comm_hook(None, _reduce_bucket)
        return replica


def _reduce_bucket(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's default: one all-reduce of each bucket."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Traffic(NamedTuple):
    """Collectives of one kind. `nbytes`: of their unsharded tensors; of an all-to-all, of what this process
    sends or receives, whichever is more."""

    count: int = 0
    nbytes: int = 0


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of this process.

    Attributes:
        found: by (operation, group); the group is "context" for the one named `context`, else "all".
    """

    def __init__(self, context: str | None = None):
        super().__init__()
        self.found: dict[tuple[str, str], Traffic] = {}
        self._context = context

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives are on its local tensors
        out = operation(*args, **(kwargs or {}))
        name = operation.name().partition("::")[2]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in _LOCAL:
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            names = [each for each in args if isinstance(each, str)]
            group = "context" if self._context in names else "all"
            key = _NAMES.get(name, name), group
            before = self.found.get(key, Traffic())
            self.found[key] = Traffic(
                before.count + 1, before.nbytes + max(x.nbytes for x in tensors)
            )
        return out


def sent_bytes(operation: str, nbytes: float, size: int) -> float:
    """Bytes that each of `size` processes sends, in ring algorithms, for collectives of `nbytes`."""
    if operation == "all-to-all":
        return nbytes
    return nbytes * (1 - 1 / size) * (2 if operation == "all-reduce" else 1)
