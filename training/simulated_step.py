"""Counts the collectives of one training step on processes that do not exist."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from errors import TrainingError
from model import TokenPositions
from run_directory.run_settings import RunSettings
from training.distributed.simulated import CollectiveCounter, SimulatedParallel, Traffic
from training.micro_batches import MicroBatch
from training.optim.optimizer import make_optimizer
from training.optim.step_guard import StepGuard
from training.run.checks import make_model
from training.stages import Stage

TrainStep = Callable[..., object]  # train.train_step
Collectives = dict[tuple[str, str], Traffic]  # by (operation, group)


def simulated_autocast(precision: str) -> torch.dtype | None:
    """The autocast dtype of `training.precision` on GPUs that support bfloat16."""
    return torch.bfloat16 if precision in ("auto", "bfloat16") else None


def count_collectives(
    settings: RunSettings,
    parallel: SimulatedParallel,
    stage: Stage,
    micro_batch_size: int | None,
    vocab_size: int,
    train_step: TrainStep,
) -> Collectives:
    """The collectives of the first step of a stage.

    At most two micro-batches are run. All but the last one add as much as the first.

    Raises TrainingError for float64, which is for tests on CPUs.
    """
    if settings.training.precision == "float64":
        raise TrainingError("--world counts bytes of float32 and bfloat16: set training.precision")
    rows = stage.batch_size // parallel.data_world
    size = min(micro_batch_size or rows, rows)
    before, last = divmod(rows - 1, size)
    count = _Counting(settings, parallel, stage, vocab_size, train_step)
    one = count([last + 1])
    if before == 0:
        return one
    two = count([size, last + 1])

    def total(key: tuple[str, str]) -> Traffic:
        pairs = zip(one.get(key, Traffic()), two[key], strict=True)
        return Traffic(*(a + before * (b - a) for a, b in pairs))

    return {key: total(key) for key in two}


class _WithoutWeights(TorchFunctionMode):
    """Allocates no weights of modules; constants of positional schemes are real tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        more = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **(kwargs or {}) | more)


class _Counting:
    """Runs steps of a new model with fake weights."""

    def __init__(
        self,
        settings: RunSettings,
        parallel: SimulatedParallel,
        stage: Stage,
        vocab_size: int,
        train_step: TrainStep,
    ):
        self._settings = settings.model_copy(update={"model": stage.model})
        self._parallel = parallel
        self._length = stage.length
        self._packed = settings.data.packing == "intra_document"
        self._vocab_size = vocab_size
        self._train_step = train_step

    def __call__(self, sizes: list[int]) -> Collectives:
        """The collectives of one step with micro-batches of these numbers of sequences."""
        t = self._settings.training
        parallel = self._parallel
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with _WithoutWeights():
            model = make_model(self._settings, self._vocab_size).train()
        with fake:
            model.to_empty(device=parallel.device)
        parts = [self._part(size) for size in sizes]
        n_targets = sum(sizes) * self._length
        for part in parts:  # tables are real tensors, computed once
            model.prepare(part.positions.part(0, 2))
        autocast = simulated_autocast(t.precision)
        wrapped = parallel.wrap(model, autocast=autocast)  # device meshes have real tensors
        with fake:
            optimizer = make_optimizer(model, t.optimizer)
            guard = StepGuard(t.on_nonfinite, t.on_spike, parallel.device)
            with CollectiveCounter(parallel.shard.group if parallel.shard else None) as counter:
                self._train_step(
                    *(wrapped, parallel, optimizer, guard, parts, n_targets * parallel.data_world),
                    grad_clip=t.grad_clip,
                    z_loss=t.z_loss,
                    autocast=autocast,
                )
        return counter.found

    def _part(self, size: int) -> MicroBatch:
        tokens = torch.zeros(size, self._length, dtype=torch.int64)
        shard = self._parallel.shard
        if shard is not None:
            tokens = shard.select(tokens)
        # One document: masks of several take many small operations. They change collectives only in layers
        # with sinks, by their layout.
        positions = TokenPositions.plain(self._length)
        if self._packed and any(choice.sinks for choice in self._settings.model.kinds.values()):
            positions = replace(positions, layout="packed")
        return MicroBatch(tokens, tokens, positions, shard)
