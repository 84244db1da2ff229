"""Counts the collectives of this process."""

from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATIONS = {
    "all-gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-reduce": ("allreduce_", "all_reduce"),
    "all-to-all": ("alltoall_base_", "all_to_all_single"),
}
LOCAL = "wait_tensor", "_wrap_tensor_autograd"  # operations that communicate nothing
NAMES = {operation: name for name, operations in OPERATIONS.items() for operation in operations}


class Traffic(NamedTuple):
    """Collectives of one kind; `nbytes`: of their unsharded tensors."""

    count: int = 0
    nbytes: int = 0


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives by operation in `counts`."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, Traffic] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        name = operation.name().partition("::")[2]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in LOCAL:
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            key = NAMES.get(name, name)
            count, nbytes = self.counts.get(key, Traffic())
            self.counts[key] = Traffic(count + 1, nbytes + max(x.nbytes for x in tensors))
        return out
