"""The batches of a run: read ahead in a thread, and split into micro-batches on the device."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from data import GeneratedData, RunData
from data.sampling.batches import Batch, BatchSampler, TrainingText
from data.task_data import ItemSampler
from errors import TrainingError
from model import TokenPositions
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import Stage, TrainingSchedule
from training.parallel import Parallel

RunSampler = BatchSampler | ItemSampler
AHEAD = 2  # batches read during a step, so that a slow read does not delay training


def make_sampler(settings: RunSettings, data: RunData) -> RunSampler:
    """The sampler of a run's batches.

    Raises TrainingError if no document is as long as the windows of the longest stage, and
    DataError if the text is too short for one window.
    """
    if isinstance(data, GeneratedData):
        return ItemSampler(
            data.items("training", settings.seed),
            settings.plan,
            answers_only=data.source.loss == "answers",
            seed=settings.seed,
            positions=settings.data.positions,
        )
    has_lengths = len({segment.length for segment in settings.plan}) > 1
    if has_lengths and data.longest < settings.train_length:
        raise TrainingError(
            f"training.stages go up to {settings.train_length} tokens, but the longest document "
            f"of {data.train.folder} has {data.longest:,}: lower the lengths of the stages"
        )
    shares = settings.data.mixed_shares
    texts = [
        TrainingText(text.train, Fraction(share), text.folder.name)
        for text, share in zip(data.texts, [1 - sum(shares), *shares], strict=True)
    ]
    return BatchSampler(
        texts,
        settings.plan,
        packing=settings.data.packing,
        seed=settings.seed,
        positions=settings.data.positions,
        is_carried=settings.training.state == "carry",
    )


@dataclass(frozen=True)
class MicroBatch:
    """Some of a step's sequences.

    Attributes:
        tokens, targets: (b, T), or (b, T / N) if a context group of N ranks shares the sequences.
        positions: positions of the tokens of whole sequences.
        rows: which of this process's sequences of the step these are.
    """

    tokens: Tensor
    targets: Tensor
    positions: TokenPositions
    rows: slice = field(default_factory=lambda: slice(None))

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Apply a function to every tensor."""
        positions = self.positions.map(function)
        return MicroBatch(function(self.tokens), function(self.targets), positions, self.rows)

    def to(self, parallel: Parallel) -> "MicroBatch":
        """The micro-batch on the device, with this process's share of the tokens of a context
        group. The host does not wait for copies from page-locked memory."""
        moved = self.map(lambda x: x.to(parallel.device, non_blocking=True))
        if (shard := parallel.shard) is None:
            return moved
        return replace(
            moved, tokens=shard.select(moved.tokens), targets=shard.select(moved.targets)
        )


@dataclass(frozen=True)
class StepBatch:
    """This process's sequences of one step.

    Attributes:
        stage: the stage of the step.
        parts: the micro-batches.
        n_targets: targets of the step on all ranks.
        rates: the learning rates by name.
        facts: what metrics.jsonl records about the text.
    """

    stage: Stage
    parts: list[MicroBatch]
    n_targets: int
    rates: dict[str, float] = field(default_factory=dict)
    facts: dict = field(default_factory=dict)


def step_batches(
    sampler: RunSampler, parallel: Parallel, schedule: TrainingSchedule, start: int
) -> Iterator[StepBatch]:
    """The batches of the steps from `start` to the end of the run, read in a thread up to AHEAD
    steps early.

    Raises DataError if the text of a step cannot be read, when that step is reached.
    """
    is_pinned = parallel.device.type == "cuda"

    def read(step: int) -> StepBatch:
        stage = schedule.stage(step)
        batch = sampler.batch(step, parallel.data_rank, parallel.data_world)
        parts = micro_batches(batch, stage.micro_batch_size, stage.length, is_pinned)
        facts: dict = {"targets": batch.n_targets}
        if isinstance(sampler, BatchSampler) and len(sampler.texts) > 1:
            facts["passes"] = sampler.passes(step + 1)
        facts |= {"epoch": batch.epoch, "data": batch.hash}
        return StepBatch(stage, parts, batch.n_targets, schedule.learning_rates(step), facts)

    with ThreadPoolExecutor(max_workers=1) as thread:
        steps = range(start, schedule.steps)
        reads = deque(thread.submit(read, step) for step in steps[:AHEAD])
        for step in steps:
            batch = reads.popleft().result()
            if step + AHEAD in steps:
                reads.append(thread.submit(read, step + AHEAD))
            yield replace(batch, parts=[part.to(parallel) for part in batch.parts])


def micro_batches(
    batch: Batch, size: int, length: int, is_pinned: bool = False
) -> list[MicroBatch]:
    """Split a batch into groups of at most `size` sequences on the host, in page-locked memory if
    `is_pinned`. `length` is the declared length of every row."""
    parts = []
    for start in range(0, len(batch.tokens), size):
        rows = slice(start, start + size)
        part = MicroBatch(
            torch.tensor(batch.tokens[rows]),
            torch.tensor(batch.targets[rows]),
            TokenPositions.of_rows(batch.positions, rows, length),
            rows,
        )
        parts.append(part.map(Tensor.pin_memory) if is_pinned else part)
    return parts
