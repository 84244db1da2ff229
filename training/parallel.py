"""Distributed training: ranks, DDP or sharding of the model, context groups, and reductions.

accelerate launches the processes, chooses their devices and wraps the model for DDP. Sharding uses
torch's `fully_shard` on CPUs and GPUs: accelerate cannot shard on a CPU, and a single code path can
be tested on any machine.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from errors import FAILED, RANK_LOST, TrainingError, printable
from model import ContextShard, Transformer
from model.sharding import is_broken_link
from run_directory.process_group import ProcessGroup, error_barrier
from run_directory.training_settings import TrainingSettings
from training.launch import COMMAND, check_devices, check_launch, check_world, requests_fsdp

T = TypeVar("T")
# A process that does not arrive at a collective of a step within this time is lost.
STEP_TIMEOUT = timedelta(seconds=300)
# The same limit if one process works while the others wait: hashing of the text, saving, samples.
HOST_TIMEOUT = timedelta(minutes=15)
POLL = 0.5  # seconds between two checks for an error of another process
GRACE = 2.0  # seconds in which a collective may report the error of another process too
FAILURE_SEEN = 5.0  # seconds that a failed process waits for the others to read its message


class Parallel(ProcessGroup):
    """This process and the group of all processes of a run.

    Collectives of a step use the default process group, with STEP_TIMEOUT. `gather`, `wait` and all
    methods based on them use a group of their own, with HOST_TIMEOUT.

    Attributes:
        main: whether this process prepares data, writes files and prints.
        data_rank, data_world: index and number of context groups, which divide the rows of a batch.
        takes_part: whether this process is needed to evaluate or save the model.
        device_type: type of the devices that the run is meant for; with `--world`, not of those in
            use.
        autocast_dtype: autocast dtype of forward passes; None: no autocast.
        sharded: whether the model is sharded (FSDP2) or replicated (DDP).
        shard: this rank's part of each window in a context group; None: whole windows.

    Raises TrainingError if the launcher and the settings disagree, or if the running processes are
    not those that were requested.
    """

    def __init__(self, t: TrainingSettings):
        check_launch(t, os.environ)
        check_devices(os.environ, torch.cuda.device_count())
        self._accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="no",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=STEP_TIMEOUT)],
        )
        self.settings = t.parallel
        self.device: torch.device = self._accelerator.device
        self.device_type = self.device.type
        self.rank: int = self._accelerator.process_index
        self.world: int = self._accelerator.num_processes
        self.autocast_dtype: torch.dtype | None = None
        check_world(t, os.environ, self.world)
        self.main = self.rank == 0
        self.data_rank = self.rank // t.parallel.context
        self.data_world = self.world // t.parallel.context
        sharding = t.parallel.sharding
        if sharding == "auto":
            sharding = "full" if requests_fsdp(os.environ) else "none"
        self.sharded = sharding == "full"
        self.takes_part = self.main or self.sharded
        if self.sharded and not dist.is_initialized():
            raise TrainingError(
                "training.parallel.sharding=full requires several processes: start "
                f"{COMMAND.format(n='N')}"
            )
        self._host_group = None
        if self.world > 1:
            self._host_group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        self.shard: ContextShard | None = None
        if (size := t.parallel.context) > 1:
            # Ranks of a context group are neighbors, so that their collectives stay within a node.
            sizes = (self.world // size, size)
            names = ("data", "context")
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
            group = mesh.get_group("context")
            group.set_timeout(STEP_TIMEOUT)
            self.shard = ContextShard.of(group)

    def main_first(self, work: Callable[[], T]) -> T:
        """The result of `work()` on each process; the others start when the main process has
        finished.

        Raises TrainingError on the others if `work` failed on the main process.
        """
        results: list[T] = []
        with error_barrier(self, "begin"):
            if self.main:
                results.append(work())
        return results[0] if self.main else work()

    def gather(self, value: Any) -> list[Any]:
        """Gather a host value from all processes, by rank; synchronizes: do not call it in a
        step."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self._host_group)
        return values

    def wait(self) -> None:
        """Wait for all processes."""
        self.gather(None)

    def autocast(self) -> torch.autocast:
        """A context for forward passes in the precision of the run."""
        dtype = self.autocast_dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def wrap(
        self, model: Transformer, *, compiled: bool | None = False, cuda_graphs: bool = False
    ) -> nn.Module:
        """The model for training passes, whose gradients are averaged over all processes.

        Args:
            compiled: compile the training pass; None: only on a GPU.
            cuda_graphs: record the training pass; see `Transformer.compile`.

        Sharding changes the model in place: its parameters become DTensors, so create optimizers
        afterwards, and call it on every process, also for evaluation.
        """
        checkpointing = self.settings.checkpointing
        model.checkpoint_blocks(checkpointing)
        if compiled is None:
            compiled = self.device.type == "cuda"
        if compiled and cuda_graphs:
            model.compile(cuda_graphs=True)
        elif compiled:  # hooks around blocks break a whole-model graph
            model.compile(by_block=self.sharded or checkpointing != "none", dynamic=True)
        if not self.sharded:
            return self._accelerator.prepare_model(model)  # DDP if there are several processes
        shard(model, self.device, self.world, self.autocast_dtype)
        return model

    def no_sync(self, wrapped: nn.Module, enabled: bool) -> AbstractContextManager:
        """Accumulate gradients locally in the block, if `enabled`; a later backward pass reduces
        them.

        Sharded models always reduce: unsharded gradients would need the memory that sharding saves.
        """
        return nullcontext() if self.sharded or not enabled else self._accelerator.no_sync(wrapped)

    def reshard(self, model: nn.Module) -> None:
        """Free the unsharded weights that an evaluation has gathered."""
        if self.sharded:
            model.reshard()  # type: ignore[operator]

    def sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes (all-reduce)."""
        shared = self._accelerator.reduce(x, reduction="sum")
        assert isinstance(shared, Tensor)
        return shared

    def description(self) -> dict[str, Any]:
        """The processes, for the run's manifest."""
        kind = self._accelerator.distributed_type.value
        return {"processes": self.world, "kind": kind, "device": str(self.device)}

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Leave the process group at the end of the block, once every process has finished: gloo
        aborts a process that still sends to one that has left.

        If a process raises an error in the block, the others print its message and exit with
        FAILED. If another process is lost, exit with RANK_LOST: an orderly shutdown would wait for
        it again.
        """
        failure = SharedFailure(self.rank, self.world) if self.world > 1 else None
        try:
            yield
            self.wait()
            self._accelerator.end_training()
        except Exception as error:
            if failure is not None and is_broken_link(error):
                failure.exit_if_known()
                self._exit_lost(error)
            elif failure is not None:
                failure.share(str(error) or type(error).__name__)
            raise
        finally:
            if failure is not None:
                failure.close()

    def _exit_lost(self, error: Exception) -> None:
        (message, *_) = str(error).splitlines() or [type(error).__name__]
        hangs = "timed out" in message.lower() or "timeout" in message.lower()
        print(
            f"error: (process {self.rank}) another process {'hangs' if hangs else 'has ended'}: "
            "see its output, and run the same command again to resume from the last checkpoint "
            f"({message})",
            file=sys.stderr,
            flush=True,
        )
        os._exit(RANK_LOST)


class PlannedProcesses(ProcessGroup):
    """Process 0 of `world` processes with a GPU each, none of which exists."""

    main = True
    device = torch.device("cpu")
    device_type = "cuda"
    shard = None
    autocast_dtype: torch.dtype | None = None

    def __init__(self, t: TrainingSettings, world: int):
        context = t.parallel.context
        if world % context:
            raise TrainingError(
                f"training.parallel.context = {context} does not divide --world {world}"
            )
        if t.precision == "float64":
            raise TrainingError(
                "--world does not support training.precision = float64; set bfloat16 or float32"
            )
        self.world = world
        self.data_world = world // context
        self.sharded = t.parallel.sharding == "full"

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world


class SharedFailure:
    """The error of the first process that fails, in the store that connects the processes.

    A process that waits in a collective cannot raise it, so a thread prints it and exits.
    """

    def __init__(self, rank: int, world: int):
        self._rank = rank
        self._world = world
        self._closed = threading.Event()
        self._message = ""
        self._store = dist.distributed_c10d._get_default_store()
        threading.Thread(target=self._watch, daemon=True).start()

    def share(self, message: str) -> None:
        """Give the others the error of this process, unless one of them failed before."""
        self.close()
        with suppress(RuntimeError):  # the process that holds the store has ended
            if self._store.add("failures", 1) > 1:
                return
            self._store.set("failure", f"process {self._rank}: {message}")
            end = time.monotonic() + FAILURE_SEEN
            while self._store.add("failures", 0) < self._world and time.monotonic() < end:
                time.sleep(POLL / 10)

    def exit_if_known(self) -> None:
        """Exit with FAILED and the message of another process that failed."""
        self._read()
        if self._message and not self._closed.is_set():
            text = printable(f"error: (process {self._rank}) {self._message}")
            print(text, file=sys.stderr, flush=True)
            os._exit(FAILED)

    def _read(self) -> None:
        with suppress(RuntimeError):
            if not self._message and self._store.check(["failure"]):
                self._message = self._store.get("failure").decode()
                self._store.add("failures", 1)  # from here on the other process may end

    def close(self) -> None:
        """Stop checking for errors of other processes."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._message and not self._closed.wait(POLL):
            self._read()
        if not self._closed.wait(GRACE):
            self.exit_if_known()


def shard(
    model: Transformer, device: torch.device, world: int, autocast: torch.dtype | None
) -> None:
    """Shard weights, gradients and optimizer state over all processes, block by block (FSDP2).

    The parameters outside the blocks, such as positional schemes and tied embeddings, form one more
    group, gathered for the whole pass. With autocast, blocks are gathered in its dtype, which
    halves the traffic; the other parameters and gradient reductions stay in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # a second to import

    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(
        param_dtype=autocast,
        reduce_dtype=None if autocast is None else torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def autocast_type(precision: str) -> torch.dtype | None:
    """The autocast dtype; None: no autocast."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
