"""Counts the collectives of a training step on processes that do not exist: `train.py --dry-run
--world N`.

torch's fake process group performs no communication. With fake tensors, which have shapes but no
data, the training step of any model runs on one CPU.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from errors import TrainingError
from model import TokenPositions
from run_directory.position_overrides import make_model
from run_directory.run_settings import RunSettings
from run_directory.stages import Stage
from run_directory.training_settings import TrainingSettings
from training.batches import MicroBatch, StepBatch
from training.optimizer import Optimizer
from training.parallel import Parallel
from training.step import StepGuard
from training.stop_requests import StopRequests
from training.train_state import TrainState

TrainStep = Callable[..., Any]  # train.train_step
_OPERATIONS = {
    "all-gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-reduce": ("allreduce_", "all_reduce"),
    "all-to-all": ("alltoall_base_", "all_to_all_single"),
}
_LOCAL = "wait_tensor", "_wrap_tensor_autograd"  # operations that communicate nothing
_NAMES = {operation: name for name, operations in _OPERATIONS.items() for operation in operations}


class SimulatedParallel(Parallel):
    """Process 0 of `world` processes that share no data. Tensors are on the CPU; the devices count
    as GPUs that support bfloat16.

    Raises TrainingError if this process is one of several, and as Parallel does.
    """

    def __init__(self, t: TrainingSettings, world: int):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise TrainingError(
                "--world simulates the processes: run it in one process, without a launcher"
            )
        if t.precision == "float64":
            raise TrainingError(
                "--world counts bytes of float32 and bfloat16: set training.precision"
            )
        launch = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        launch |= {"OMP_NUM_THREADS": 1}
        launch |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
        # Read by accelerate, which uses a process group that is initialized.
        os.environ.update({name: str(value) for name, value in launch.items()})
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        super().__init__(t)
        self.device_type = "cuda"

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world

    def _replicate(self, model: Any) -> nn.Module:
        # DDP compares and copies weights when it is created, and the fake group returns no result
        # of the default communication hook.
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
    """Collectives of one kind. `nbytes`: of their unsharded tensors; of an all-to-all, of what this
    process sends or receives, whichever is more."""

    count: int = 0
    nbytes: int = 0


Collectives = dict[tuple[str, str], Traffic]  # by (operation, group)


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of this process.

    Attributes:
        counts: by (operation, group); the group is "context" for the one named `context`, else
            "all".
    """

    def __init__(self, context: str | None = None):
        super().__init__()
        self.counts: Collectives = {}
        self._context = context

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives are on its local tensors
        out = operation(*args, **(kwargs or {}))
        name = operation.name().partition("::")[2]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in _LOCAL:
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            names = [argument for argument in args if isinstance(argument, str)]
            group = "context" if self._context in names else "all"
            key = _NAMES.get(name, name), group
            count, nbytes = self.counts.get(key, Traffic())
            self.counts[key] = Traffic(count + 1, nbytes + max(x.nbytes for x in tensors))
        return out


def sent_bytes(operation: str, nbytes: float, size: int) -> float:
    """Bytes that each of `size` processes sends, in ring algorithms, for collectives of
    `nbytes`."""
    if operation == "all-to-all":
        return nbytes
    return nbytes * (1 - 1 / size) * (2 if operation == "all-reduce" else 1)


def count_collectives(
    settings: RunSettings,
    parallel: Parallel,
    stage: Stage,
    micro_batch_size: int,
    vocab_size: int,
    train_step: TrainStep,
) -> Collectives:
    """The collectives of the first step of a stage.

    At most two micro-batches are run. All but the last one add as much as the first.
    """
    rows = stage.batch_size // parallel.data_world
    size = min(micro_batch_size, rows)
    before, last = divmod(rows - 1, size)
    settings = settings.model_copy(update={"model": stage.model})
    single = _count_step(settings, parallel, stage, [last + 1], vocab_size, train_step)
    if before == 0:
        return single
    double = _count_step(settings, parallel, stage, [size, last + 1], vocab_size, train_step)
    totals = {}
    for key, both in double.items():
        count, nbytes = single.get(key, Traffic())
        totals[key] = Traffic(
            count + before * (both.count - count), nbytes + before * (both.nbytes - nbytes)
        )
    return totals


class _WithoutWeights(TorchFunctionMode):
    """Allocates no weights of modules; constants of positional schemes are real tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        more = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **(kwargs or {}) | more)


def _count_step(
    settings: RunSettings,
    parallel: Parallel,
    stage: Stage,
    sizes: list[int],
    vocab_size: int,
    train_step: TrainStep,
) -> Collectives:
    """The collectives of a step of a new model with micro-batches of these numbers of sequences."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _WithoutWeights():
        model = make_model(settings, vocab_size).train()
    with fake:
        model.to_empty(device=parallel.device)
    batch = synthetic_batch(settings, parallel, stage, sizes, vocab_size)
    for part in batch.parts:  # tables are real tensors, computed once
        model.prepare(part.positions.part(0, 2))
    forward = parallel.wrap(model)  # device meshes have real tensors
    t = settings.training
    with fake:
        state = TrainState(
            model=model,
            optimizer=Optimizer(model, t.optimizer),
            guard=StepGuard(t.on_nonfinite, t.on_spike, parallel.device),
            ema=None,
            forward=forward,
        )
        with CollectiveCounter(parallel.shard.group if parallel.shard else None) as counter:
            train_step(state, batch, parallel, t, StopRequests())
    return counter.counts


def synthetic_batch(
    settings: RunSettings, parallel: Parallel, stage: Stage, sizes: list[int], vocab_size: int
) -> StepBatch:
    """A batch of random tokens, with micro-batches of these numbers of sequences."""
    # One document: masks of several take many small operations. They change collectives only in
    # layers with sinks, by their layout.
    positions = TokenPositions.plain(stage.length, device=parallel.device)
    has_sinks = any(kind.position.sinks for kind in settings.model.resolved_kinds.values())
    if settings.data.packing == "intra_document" and has_sinks:
        positions = replace(positions, layout="packed")
    parts = []
    for size in sizes:
        tokens = torch.randint(vocab_size, (size, stage.length), device=parallel.device)
        if parallel.shard is not None:
            tokens = parallel.shard.select(tokens)
        parts.append(MicroBatch(tokens, tokens, positions, parallel.shard))
    return StepBatch(stage, parts, sum(sizes) * stage.length * parallel.data_world, facts={})
