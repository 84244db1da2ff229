"""The batches of a run: read ahead in a thread, and split into micro-batches on the device."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from data.sampling.batches import Batch
from data.sampling.item_batches import RunSampler
from model import ContextShard, TokenPositions
from model.devices import to_device
from training.distributed.parallel import Parallel
from training.schedule import TrainingSchedule

AHEAD = 2  # batches read during a step, so that one that takes long does not delay training


@dataclass(frozen=True)
class MicroBatch:
    """Some of a step's sequences, on the device.

    Attributes:
        tokens, targets: (b, T), or (b, T / N) if a context group of N ranks shares the sequences.
        positions: of whole sequences.
        shard: this rank's part of the sequences; None: all.
        rows: of this process's sequences of the step.
    """

    tokens: Tensor
    targets: Tensor
    positions: TokenPositions
    shard: ContextShard | None = None
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class StepBatch:
    """This process's sequences of one step.

    Attributes:
        parts: the micro-batches.
        n_targets: targets of the step on all ranks.
        facts: what metrics.jsonl records about the text.
    """

    parts: list[MicroBatch]
    n_targets: int
    facts: dict


class Batches:
    """Iterates over the batches of the steps from `start` to the end of the run.

    Raises DataError, in the step it belongs to, where the text cannot be read.
    """

    def __init__(
        self, sampler: RunSampler, parallel: Parallel, schedule: TrainingSchedule, start: int
    ):
        self._sampler = sampler
        self._parallel = parallel
        self._schedule = schedule
        self._start = start

    def __iter__(self) -> Iterator[StepBatch]:
        batches = read_ahead(self._read, self._start, self._schedule.steps)
        for step, batch in enumerate(batches, self._start):
            yield self._on_device(step, batch)

    def _read(self, step: int) -> Batch:
        batch = self._sampler.batch(
            step,
            self._parallel.data_rank,
            self._parallel.data_world,
        )
        return batch.pinned() if self._parallel.device.type == "cuda" else batch

    def _on_device(self, step: int, batch: Batch) -> StepBatch:
        stage = self._schedule.stage(step)
        parts = micro_batches(
            batch,
            size=self._schedule.micro_batch_size(stage),
            length=stage.length,
            device=self._parallel.device,
            shard=self._parallel.shard,
        )
        facts: dict = {"targets": batch.n_targets}
        if batch.passes:
            facts["passes"] = batch.passes
        facts |= {"epoch": batch.epoch, "data": batch.hash}
        return StepBatch(parts, batch.n_targets, facts)


def read_ahead(
    read: Callable[[int], Batch],
    start: int,
    stop: int,
) -> Iterator[Batch]:
    """`read(step)` for each step, computed in a thread up to AHEAD steps early; its errors are
    raised in their step."""
    # An executor would cost the consumer about 60 microseconds per step.
    wanted: SimpleQueue[int | None] = SimpleQueue()
    done: SimpleQueue[Batch | BaseException] = SimpleQueue()

    def work() -> None:
        while (step := wanted.get()) is not None:
            try:
                done.put(read(step))
            except BaseException as error:
                done.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        for step in range(start, stop + AHEAD):
            if step < stop:
                wanted.put(step)
            if step < start + AHEAD:
                continue
            batch = done.get()
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        wanted.put(None)
        thread.join()


def micro_batches(
    batch: Batch,
    size: int | None,
    length: int,
    device: torch.device,
    shard: ContextShard | None = None,
) -> list[MicroBatch]:
    """Split a batch into groups of at most `size` sequences (None: one group), moved to the device
    without waiting. `length` is the declared length of every row."""
    tokens = batch.tokens
    targets = batch.targets
    if shard is not None:
        tokens = shard.select(tokens)
        targets = shard.select(targets)
    count = batch.tokens.shape[0]
    return [
        MicroBatch(
            tokens=_rows(tokens, rows, device),
            targets=_rows(targets, rows, device),
            positions=TokenPositions(
                order=_rows(batch.order, rows, device),
                position=_rows(batch.position, rows, device),
                document=_rows(batch.document, rows, device),
                layout=batch.layout,
                position_end=batch.position_end,
                lengths=(length,),
                unit_steps=batch.unit_steps,
            ),
            shard=shard,
            rows=rows,
        )
        for rows in _groups(count, size or count)
    ]


def _groups(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _rows(x: Tensor, rows: slice, device: torch.device) -> Tensor:
    """Some rows on the device; all of a tensor with one row, which every sequence shares."""
    return to_device(x if x.shape[0] == 1 else x[rows], device)
