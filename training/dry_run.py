"""Prints parameters, memory and time of a run before it starts: `train.py --dry-run`."""

import time
from collections.abc import Callable
from typing import Any

import torch

from data import check_items, check_texts, is_prepared
from model import TokenPositions
from run_directory.console import duration
from run_directory.position_overrides import make_model
from run_directory.training_schedule import TrainingSchedule, flops_of
from training.description import describe_parent, describe_run
from training.memory_estimate import MemoryEstimate, size_text
from training.micro_batches import MicroBatch, StepBatch
from training.setup import TrainingRun
from training.train_state import TrainState

TrainStep = Callable[..., Any]  # train.train_step
# FLOPs of a step with activation checkpointing: full adds a forward pass, selective no matrix
# products.
RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
MEASURED_STEPS = 3  # measured after one step that compiles and allocates memory
MEASURED_TOKENS = 1 << 13  # tokens of a measured step on each device, at least one sequence


def dry_run(run: TrainingRun, train_step: TrainStep) -> int:
    """Print the size, memory and time of a run; returns the exit status, 1 if it does not fit.

    Args:
        train_step: the `train_step` of train.py.

    Raises DataError if the text of the run does not exist, or contains the task items of the
    validation text.
    """
    is_planned = run.options.world is not None
    settings = run.settings
    parent = run.parent
    check_items(settings.data)
    if not (parent is not None and parent.is_gone) and not is_prepared(settings.data):
        check_texts(settings.data)
    estimate = MemoryEstimate(settings, run.parallel, parent)
    model = estimate.model
    fits = is_planned or estimate.needed <= estimate.free
    parts = (f"{name} {size_text(n)}" for name, n in estimate.parts.items() if n)
    rows = describe_run(settings, model)
    rows.append(("memory on each device", f"about {size_text(estimate.needed)}"))
    rows.append(("of which", ", ".join(parts)))
    if is_planned:
        recomputed = RECOMPUTED[settings.training.parallel.checkpointing]
        flops = flops_of(settings, model.vocab_size, settings.first_step)
        flops = flops * recomputed / run.parallel.world
        rows.append(("training FLOPs, each device", f"{flops:.3g}"))
    else:
        rows.append(("free memory", size_text(estimate.free)))
        if fits:
            left = settings.trained_tokens - settings.tokens_after(settings.first_step)
            time_left = duration(left / tokens_per_second(run, model.vocab_size, train_step))
            rows.append(("time", f"about {time_left} without validation, measured on a few steps"))
    if parent is not None:
        rows += describe_parent(settings, parent)
    if not run.parallel.main:
        return 0
    run.console.table("forecast", ["", ""], rows)
    if not fits:
        run.console.warn(f"this will not fit: {estimate.fixes}")
    return 0 if fits else 1


def tokens_per_second(run: TrainingRun, vocab_size: int, train_step: TrainStep) -> float:
    """The rate of all devices, measured in a few steps of the longest stage on random sequences."""
    parallel = run.parallel
    settings = run.settings
    schedule = TrainingSchedule(settings)
    stage = max(schedule.stages, key=lambda stage: stage.length)
    size = min(
        stage.micro_batch_size,
        stage.batch_size // parallel.data_world,
        max(1, MEASURED_TOKENS // stage.length),
    )
    settings = settings.model_copy(update={"model": stage.model})
    model = make_model(settings, vocab_size).initialize(settings.seed).to(run.device).train()
    state = TrainState.create(model, settings, parallel)
    tokens = torch.randint(vocab_size, (size, stage.length))
    part = MicroBatch(tokens, tokens, TokenPositions.plain(stage.length)).to(parallel)
    batch = StepBatch(stage, [part], size * stage.length * parallel.data_world)
    times = []
    for _ in range(1 + MEASURED_STEPS):
        begin = time.perf_counter()
        train_step(state, batch, parallel, settings.training, run.requests).read()
        times.append(time.perf_counter() - begin)
    return batch.n_targets / min(times[1:])
