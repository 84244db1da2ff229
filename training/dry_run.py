"""Prints parameters, memory and time of a run before it starts: `train.py --dry-run`."""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from data import check_texts, is_prepared
from data.sampling.segments import Segment
from errors import TrainingError
from model import TokenPositions, Transformer
from model.devices import free_memory
from run_directory.console import duration
from run_directory.position_overrides import make_model
from run_directory.process_group import ProcessGroup
from run_directory.stages import Stage
from run_directory.training_settings import TrainingSettings
from training.announcement import steps_in_words
from training.checks import sampled
from training.memory_estimate import (
    MemoryLayout,
    fixes_for,
    memory,
    model_and_layout,
    size_text,
    vocabulary_of,
)
from training.micro_batches import MicroBatch, StepBatch
from training.optimizer import Optimizer
from training.parallel import Parallel
from training.schedule import TrainingSchedule
from training.setup import TrainingRun, changed_rates
from training.stop_requests import StopRequests
from training.train_state import TrainState

TrainStep = Callable[..., Any]  # train.train_step
# FLOPs of a step with activation checkpointing: full adds a forward pass, selective no matrix
# products.
RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
MEASURED = 3  # steps that are timed, after one that compiles and allocates memory
MEASURED_FLOPS = 1e12  # of a measured step: it has as many sequences, or one
FORWARD = 1 / 3  # FLOPs of a forward pass, as a share of those of a training step


class PlannedProcesses(ProcessGroup):
    """Process 0 of `world` processes with a GPU each, none of which exists."""

    main = True
    device = torch.device("cpu")
    device_type = "cuda"
    shard = None

    def __init__(self, t: TrainingSettings, world: int):
        context = t.parallel.context
        if world % context:
            raise TrainingError(
                f"training.parallel.context = {context} does not divide --world {world}"
            )
        if t.precision == "float64":
            raise TrainingError("--world plans for bfloat16 or float32: set training.precision")
        self.world = world
        self.data_world = world // context
        self.sharded = t.parallel.sharding == "full"
        self.autocast_dtype: torch.dtype | None = None

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world

    def agree(self, value: Any, what: str, fix: str) -> None:
        """There is no other process to disagree."""


def dry_run(options: Namespace, requests: StopRequests, train_step: TrainStep) -> int:
    """Print the size, memory and time of a run; returns the exit status, 1 where it does not fit.

    Args:
        train_step: that of train.py.

    Raises DataError where its text does not exist.
    """
    make_parallel = Parallel
    if options.world is not None:
        make_parallel = partial(PlannedProcesses, world=options.world)
    run = TrainingRun(options, requests, make_parallel)
    settings = run.settings
    parent = run.parent
    is_parent_gone = settings.parent is not None and parent is None  # the run has its text
    if not is_parent_gone and not is_prepared(settings.data):
        check_texts(settings.data)
    model, layout = model_and_layout(settings, run.parallel, parent)
    parts = memory(model, settings.train_length, layout)
    free = free_memory(run.parallel.device)
    fits = options.world is not None or sum(parts.values()) <= free
    rows = size_rows(run, model)
    plan = after(settings.plan, settings.first_step)
    rows.append(("memory on each device", f"about {size_text(sum(parts.values()))}"))
    rows.append(("of which", ", ".join(f"{name} {size_text(n)}" for name, n in parts.items() if n)))
    if options.world is not None:
        flops = flops_of(model, plan, layout) / layout.world
        rows.append(("training FLOPs, each device", f"{flops:.3g}"))
    else:
        rows.append(("free memory", size_text(free)))
    if options.world is None and fits:
        seconds = run_seconds(run, model, layout, plan, train_step)
        rows.append(("time", f"about {duration(seconds)}, measured on a few steps"))
    rows += parent_rows(run)
    if not run.parallel.main:
        return 0
    run.console.table("forecast", ["", ""], rows)
    if not fits:
        run.console.warn(f"this will not fit: {fixes_for(model, settings, layout, free)}")
    return 0 if fits else 1


def size_rows(run: TrainingRun, model: Transformer) -> list[tuple[str, str]]:
    """The parameters, steps, tokens, stages and learning rates of a run."""
    settings = run.settings
    steps = f"{settings.steps:,} of {steps_in_words(settings)}"
    tokens = f"{settings.trained_tokens:,}"
    if first := settings.first_step:  # a fork: its parent has trained the first steps
        steps += f"; {settings.steps - first:,} are left after step {first:,}"
        tokens += f"; {settings.trained_tokens - settings.tokens_after(first):,} are left"
    rows = [("parameters", f"{model.parameter_count():,}"), ("steps", steps), ("tokens", tokens)]
    if settings.data.positions.name != "plain":
        rows.append(("sampled positions", sampled(settings)))
    for stage in TrainingSchedule(settings).stages:
        if stage.overrides:
            rows.append((f"after step {stage.start:,}", ", ".join(stage.overrides)))
    optimizer = Optimizer(model, settings.training.optimizer)
    rates = settings.training.optimizer.rates
    return rows + [(name, f"{rate:g}, {optimizer.describe(name)}") for name, rate in rates.items()]


def parent_rows(run: TrainingRun) -> list[tuple[str, str]]:
    """The runs that a run starts from, and what it changes."""
    settings = run.settings
    parent = run.parent
    if parent is None:
        return []
    first, *earlier = [
        f"{old['run']}, step {old['step']:,} (checkpoint {old['checkpoint_hash'][:10]}), "
        f"trained at {old['train_length']} tokens"
        for old in parent.lineage(settings)
    ]
    rows = [("fork of" if settings.is_fork else "extension of", first)]
    rows += [("before it", text) for text in earlier]
    rows += [("changed", text) for text in parent.changed(settings)]
    if settings.is_fork:
        rows += [("after the fork", text) for text in changed_rates(settings, parent)]
    return rows


def flops_of(model: Transformer, plan: Sequence[Segment], layout: MemoryLayout) -> float:
    """FLOPs of the steps of a plan."""
    return RECOMPUTED[layout.checkpointing] * sum(
        part.steps * part.batch_size * part.length * model.flops_per_token(part.length)
        for part in plan
    )


def run_seconds(
    run: TrainingRun,
    model: Transformer,
    layout: MemoryLayout,
    plan: Sequence[Segment],
    train_step: TrainStep,
) -> float:
    """Seconds of the steps of a plan and of their validations, at the rate of measured steps of
    the longest stage.

    Args:
        model: on the meta device.
    """
    settings = run.settings
    v = settings.training.validation
    lengths = [multiple * settings.train_length for multiple in v.multiples]
    lengths = [n for n in lengths if model.limit is None or n <= model.limit]
    validation = v.spans * sum(n * model.flops_per_token(n) for n in lengths) * FORWARD
    times = sum(step > settings.first_step for step in v.steps(settings.steps))
    flops = flops_of(model, plan, layout) + times * validation
    schedule = TrainingSchedule(settings)
    stage = max(schedule.stages, key=lambda stage: stage.length)
    sequence = flops_of(model, [Segment(stage.length, 1, 1)], layout)
    size = min(schedule.micro_batch_size(stage), max(1, int(MEASURED_FLOPS / sequence)))
    return flops / measured_rate(run, layout, stage, size, train_step)


def measured_rate(
    run: TrainingRun, layout: MemoryLayout, stage: Stage, size: int, train_step: TrainStep
) -> float:
    """FLOP/s of all devices in training steps of at most `size` random sequences per device."""
    parallel = run.parallel
    settings = run.settings.model_copy(update={"model": stage.model})
    vocab_size = vocabulary_of(settings, run.parent)
    model = make_model(settings, vocab_size).initialize(settings.seed).to(run.device).train()
    state = TrainState.create(model, settings, parallel)
    size = min(size, stage.batch_size // parallel.data_world)
    tokens = torch.randint(vocab_size, (size, stage.length), device=run.device)
    if parallel.shard is not None:
        tokens = parallel.shard.select(tokens)
    positions = TokenPositions.plain(stage.length, device=run.device)
    part = MicroBatch(tokens, tokens, positions, parallel.shard)
    batch = StepBatch(stage, [part], size * stage.length * parallel.data_world, facts={})
    times = []
    for _ in range(1 + MEASURED):
        begin = time.perf_counter()
        train_step(state, batch, parallel, settings.training, run.requests).read()
        times.append(time.perf_counter() - begin)
    measured = Segment(stage.length, size * parallel.data_world, 1)
    return flops_of(model, [measured], layout) / min(times[1:])


def after(plan: Sequence[Segment], step: int) -> list[Segment]:
    """The segments of a plan that remain after the first `step` steps."""
    left = []
    for segment in plan:
        steps = max(0, segment.steps - step)
        step = max(0, step - segment.steps)
        left += [segment._replace(steps=steps)] if steps else []
    return left
