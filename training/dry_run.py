"""Estimates parameters, memory and time of a run before it starts: `train.py --dry-run`."""

import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from data import check_texts, is_prepared
from data.sampling.segments import Segment
from model import Transformer
from model.devices import free_memory
from run_directory.console import duration
from run_directory.position_overrides import make_model
from run_directory.stages import Stage
from training.checks import sampled
from training.hardware import USUAL_SHARE, peak_flops
from training.memory import (
    MemoryLayout,
    fixes_for,
    memory,
    model_and_layout,
    size_text,
    vocabulary_of,
)
from training.optimizer import Optimizer
from training.parallel import Parallel
from training.schedule import TrainingSchedule
from training.setup import TrainingRun, changed_rates
from training.simulated import (
    SimulatedParallel,
    TrainStep,
    count_collectives,
    sent_bytes,
    synthetic_batch,
)
from training.stop_requests import StopRequests
from training.summary import steps_in_words
from training.train_state import TrainState

# FLOPs of a step with activation checkpointing: full adds a forward pass, selective no matrix
# products.
RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
MEASURED = 3  # steps of a stage that are timed, after one that compiles and allocates memory
LONGEST = 4.0  # estimated seconds of a measured step; it has fewer sequences where it takes longer
FORWARD = 1 / 3  # FLOPs of a forward pass, as a share of those of a training step


def dry_run(options: Namespace, requests: StopRequests, train_step: TrainStep) -> int:
    """Print the size, memory and time of a run, and with `--world` its communication; returns the
    exit status."""
    make_parallel = Parallel
    if options.world is not None:
        make_parallel = partial(SimulatedParallel, world=options.world)
    run = TrainingRun(options, requests, make_parallel)
    status = show_forecast(run, train_step)
    if isinstance(run.parallel, SimulatedParallel):
        show_communication(run, train_step)
    return status


def show_forecast(run: TrainingRun, train_step: TrainStep) -> int:
    """Print the estimated size, memory and time of a run. Returns an exit status: 1 where it does
    not fit.

    Raises DataError where its text does not exist.
    """
    settings = run.settings
    parallel = run.parallel
    parent = run.parent
    has_parent = parent is not None or settings.parent is None  # without it: already prepared
    if has_parent and not is_prepared(settings.data):
        check_texts(settings.data)
    model, layout = model_and_layout(settings, parallel, parent)
    length = settings.train_length
    parts = memory(model, length, layout)
    needed = sum(parts.values())
    free = free_memory(parallel.device)
    is_simulated = isinstance(parallel, SimulatedParallel)
    fits = is_simulated or needed <= free
    steps = f"{settings.steps:,} of {steps_in_words(settings)}"
    tokens = f"{settings.trained_tokens:,}"
    left = after(settings.plan, settings.first_step)
    if done := settings.first_step:  # a fork: its parent has trained the first steps
        steps += f"; {settings.steps - done:,} are left after step {done:,}"
        tokens += f"; {settings.trained_tokens - settings.tokens_after(done):,} are left"
    rows = [("parameters", f"{model.parameter_count():,}"), ("steps", steps), ("tokens", tokens)]
    if settings.data.positions.name != "plain":
        rows.append(("sampled positions", sampled(settings)))
    for stage in TrainingSchedule(settings).stages:
        if stage.overrides:
            rows.append((f"after step {stage.start:,}", ", ".join(stage.overrides)))
    memory_text = f"about {size_text(needed)}"
    if is_simulated:
        shape = (layout.sequences, length // layout.context, settings.model.dim)
        rows += [
            ("activations of a layer, each device", " × ".join(f"{n:,}" for n in shape)),
            ("memory on each device", memory_text),
            ("of which", ", ".join(f"{name} {size_text(n)}" for name, n in parts.items() if n)),
            ("training FLOPs, each device", f"{flops_of(model, left, layout) / layout.world:.3g}"),
        ]
    else:
        rows.append(("memory on each device", f"{memory_text}; {size_text(free)} are free"))
        rows.append(("time", time_text(run, model, layout, left, train_step if fits else None)))
    optimizer = settings.training.optimizer
    by_rate = Optimizer(model, optimizer)
    rows += [
        (name, f"{rate:g}, {by_rate.describe(name)}") for name, rate in optimizer.rates.items()
    ]
    if parent is not None:
        first, *earlier = [
            f"{old['run']}, step {old['step']:,} (checkpoint {old['checkpoint_hash'][:10]}), "
            f"trained at {old['train_length']} tokens"
            for old in parent.lineage(settings)
        ]
        rows.append(("fork of" if settings.is_fork else "extension of", first))
        rows += [("before it", text) for text in earlier]
        rows += [("changed", text) for text in parent.changed(settings)]
        if settings.is_fork:
            rows += [("after the fork", text) for text in changed_rates(settings, parent)]
    if not parallel.main:
        return 0
    run.console.table("forecast", ["", ""], rows)
    if not fits:
        run.console.warn(f"this will not fit: {fixes_for(model, settings, layout, free)}")
    return 0 if fits else 1


def flops_of(model: Transformer, plan: Sequence[Segment], layout: MemoryLayout) -> float:
    """FLOPs of the steps of a plan."""
    return RECOMPUTED[layout.checkpointing] * sum(
        part.steps * part.batch_size * part.length * model.flops_per_token(part.length)
        for part in plan
    )


def time_text(
    run: TrainingRun,
    model: Transformer,
    layout: MemoryLayout,
    plan: Sequence[Segment],
    train_step: TrainStep | None,
) -> str:
    """The estimated time of the steps of a plan and of their validations, from measured steps where
    one sequence is short enough, and how it was estimated.

    Args:
        model: on the meta device.
        train_step: None: do not measure.
    """
    settings = run.settings
    length = settings.train_length
    rate = USUAL_SHARE * peak_flops(run.device, run.parallel.autocast_dtype)
    rows = int(LONGEST * rate / flops_of(model, [Segment(length, 1, 1)], layout))
    rate *= layout.world
    flops = flops_of(model, plan, layout)
    how = f"at {USUAL_SHARE:.0%} of its peak rate"
    if train_step is not None and rows:
        how = "measured on a few steps"
        schedule = TrainingSchedule(settings)
        seconds = {}
        for stage in schedule.stages:
            size = min(rows, schedule.micro_batch_size(stage))
            pace = measured_rate(run, layout, stage, size, train_step)
            seconds[stage.length, stage.batch_size] = 1 / pace
        rate = flops / sum(flops_of(model, [part], layout) * seconds[part[:2]] for part in plan)
    v = settings.training.validation
    lengths = [multiple * length for multiple in v.multiples]
    lengths = [n for n in lengths if model.limit is None or n <= model.limit]
    validation = v.spans * sum(n * model.flops_per_token(n) for n in lengths) * FORWARD
    times = sum(step > settings.first_step for step in v.steps(settings.steps))
    total = duration((flops + times * validation) / rate)
    return f"about {total} on {layout.world} × {run.device.type}, {how}"


def measured_rate(
    run: TrainingRun, layout: MemoryLayout, stage: Stage, rows: int, train_step: TrainStep
) -> float:
    """FLOP/s of all devices in training steps of at most `rows` random sequences per device."""
    parallel = run.parallel
    settings = run.settings.model_copy(update={"model": stage.model})
    vocab_size = vocabulary_of(settings, run.parent)
    model = make_model(settings, vocab_size).initialize(settings.seed).to(run.device).train()
    state = TrainState.create(model, settings, parallel)
    rows = min(rows, stage.batch_size // parallel.data_world)
    batch = synthetic_batch(settings, parallel, stage, [rows], vocab_size)
    times = []
    for _ in range(1 + MEASURED):
        begin = time.perf_counter()
        train_step(state, batch, parallel, settings.training, run.requests).read()
        times.append(time.perf_counter() - begin)
    count = Segment(stage.length, rows * parallel.data_world, 1)
    return flops_of(model, [count], layout) / min(times[1:])


def after(plan: Sequence[Segment], done: int) -> list[Segment]:
    """The segments of a plan that remain after the first `done` steps."""
    left = []
    for segment in plan:
        steps = max(0, segment.steps - done)
        done = max(0, done - segment.steps)
        left += [segment._replace(steps=steps)] if steps else []
    return left


def show_communication(run: TrainingRun, train_step: TrainStep) -> None:
    """Print the collectives of the first step of each stage, on each of the simulated processes.

    Args:
        train_step: that of train.py.
    """
    settings = run.settings
    schedule = TrainingSchedule(settings)
    rows = []
    sizes = {"all": run.parallel.world, "context": settings.training.parallel.context}
    for stage in schedule.stages:
        collectives = count_collectives(
            settings,
            run.parallel,
            stage,
            schedule.micro_batch_size(stage),
            vocabulary_of(settings, run.parent),
            train_step,
        )
        for (operation, group), traffic in collectives.items():
            sent = sent_bytes(operation, traffic.nbytes, sizes[group])
            rows.append(
                (
                    f"{stage.batch_size} × {stage.length:,}",
                    operation,
                    f"{sizes[group]} ({group})",
                    f"{traffic.count:,}",
                    f"{traffic.nbytes:,}",
                    size_text(sent),
                )
            )
    run.console.table(
        "communication of each device in one step",
        ["windows × tokens", "collective", "processes", "number", "bytes", "sent in a ring"],
        rows,
    )
