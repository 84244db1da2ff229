"""Estimates parameters, memory and time of a run before it starts: `train.py --dry-run`."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from data import check_texts
from data.sampling.segments import Segment
from model import Transformer
from model.devices import free_memory
from run_directory.console import Console, duration
from run_directory.parent_run import ParentRun
from run_directory.run_settings import RunSettings
from run_directory.stages import stages_of
from training.checks import sampled
from training.distributed.parallel import Parallel
from training.distributed.simulated import (
    SimulatedParallel,
    TrainStep,
    count_collectives,
    sent_bytes,
)
from training.first_checkpoint import changed_rates
from training.hardware import RECOMPUTED, USUAL_SHARE, peak_flops
from training.memory import (
    MemoryLayout,
    fixes_for,
    memory,
    model_and_layout,
    size_text,
    vocabulary_of,
)
from training.optim.optimizer import parameters_at_rate
from training.schedule import TrainingSchedule
from training.setup import launch
from training.summary import steps_in_words


def dry_run(options: Namespace, train_step: TrainStep) -> int:
    """Print the size, memory and time of a run, and with `--world` its communication; returns the
    exit status."""
    make_parallel = Parallel
    if options.world is not None:
        make_parallel = partial(SimulatedParallel, world=options.world)
    launched = launch(options, make_parallel)
    settings = launched.settings
    parallel = launched.parallel
    console = launched.console
    status = show_forecast(settings, parallel, console, launched.parent)
    if isinstance(parallel, SimulatedParallel):
        show_communication(settings, parallel, console, train_step, launched.parent)
    return status


@dataclass(frozen=True)
class RunForecast:
    """Estimated memory and time of a run."""

    parameters: int
    flops_per_token: float
    steps: int
    tokens: int
    memory: int  # bytes per device
    seconds: float


def forecast(
    model: Transformer, length: int, plan: Sequence[Segment], layout: MemoryLayout, *, peak: float
) -> RunForecast:
    """Estimate memory and time of a run.

    Args:
        length: tokens of the longest window.
        plan: the steps of the run.
        layout: the devices, and the windows of `length` tokens per pass.
        peak: FLOP/s of one device.
    """
    tokens = [segment.steps * segment.batch_size * segment.length for segment in plan]
    flops = sum(n * model.flops_per_token(p.length) for n, p in zip(tokens, plan, strict=True))
    again = RECOMPUTED[layout.checkpointing]
    return RunForecast(
        parameters=model.parameter_count(),
        flops_per_token=flops / sum(tokens),
        steps=sum(segment.steps for segment in plan),
        tokens=sum(tokens),
        memory=round(sum(memory(model, length, layout).values())),
        seconds=again * flops / (peak * USUAL_SHARE * layout.world),
    )


def show_forecast(
    settings: RunSettings, parallel: Parallel, console: Console, parent: ParentRun | None = None
) -> int:
    """Print the estimated size, memory and time of a run. Returns an exit status: 1 where it does
    not fit.

    Raises DataError where its text does not exist.
    """
    device = parallel.device
    if parent is not None or settings.parent is None:  # without its parent: already prepared
        check_texts(settings.data)
    if not parallel.main:
        return 0
    model, layout = model_and_layout(settings, parallel, parent)
    length = settings.train_length
    is_simulated = isinstance(parallel, SimulatedParallel)
    peak = (
        1.0 if is_simulated else peak_flops(device, parallel.autocast_dtype)
    )  # of GPUs that are not known
    whole = forecast(model, length, settings.plan, layout, peak=peak)
    free = free_memory(device)
    steps = f"{whole.steps:,} of {steps_in_words(settings)}"
    tokens = f"{whole.tokens:,}"
    time = f"about {duration(whole.seconds)}"
    if done := settings.first_step:  # a fork: its parent has trained the first steps
        left = forecast(
            model,
            length,
            after(settings.plan, done),
            layout,
            peak=peak,
        )
        steps += f"; {left.steps:,} are left after step {done:,}"
        tokens += f"; {left.tokens:,} are left"
        all_steps = duration(whole.seconds)
        time = f"about {duration(left.seconds)} for what is left ({all_steps} for all steps)"
    rows = [
        ("parameters", f"{whole.parameters:,}"),
        ("steps", steps),
        ("tokens", tokens),
    ]
    if settings.data.positions.name != "plain":
        rows.append(("sampled positions", sampled(settings)))
    for stage in stages_of(settings):
        if stage.overrides:
            rows.append((f"after step {stage.start:,}", ", ".join(stage.overrides)))
    if is_simulated:
        shape = (layout.sequences, length // layout.context, settings.model.dim)
        parts = memory(model, length, layout)
        flops = whole.tokens * whole.flops_per_token / layout.world
        rows += [
            ("activations of a layer, each device", " × ".join(f"{n:,}" for n in shape)),
            ("memory on each device", f"about {size_text(whole.memory)}"),
            ("of which", ", ".join(f"{name} {size_text(n)}" for name, n in parts.items() if n)),
            ("training FLOPs, each device", f"{flops:.3g}"),
        ]
    else:
        rows += [
            (
                "memory on each device",
                f"about {size_text(whole.memory)}; {size_text(free)} are free",
            ),
            ("time", f"{time} on {layout.world} × {device.type}, at 45% of its peak rate"),
        ]
    optimizer = settings.training.optimizer
    for name, rate in optimizer.rates.items():
        rows.append((name, f"{rate:g}, {parameters_at_rate(name, model, optimizer)}"))
    if parent is not None:
        rows += _ancestry(settings, parent)
    console.table("forecast", ["", ""], rows)
    if whole.memory > free and not is_simulated:
        console.warn(f"this will not fit: {fixes_for(model, settings, layout, free)}")
        return 1
    return 0


def _ancestry(settings: RunSettings, parent: ParentRun) -> list[tuple[str, str]]:
    """Rows about the ancestors of a run, and what changes in it."""
    first, *earlier = [
        f"{run['run']}, step {run['step']:,} (checkpoint {run['checkpoint_hash'][:10]}), trained "
        f"at {run['train_length']} tokens"
        for run in parent.lineage(settings)
    ]
    rows = [("fork of" if settings.is_fork else "extension of", first)]
    rows += [("before it", text) for text in earlier]
    rows += [("changed", text) for text in parent.changed(settings)]
    if settings.is_fork:
        rows += [("after the fork", text) for text in changed_rates(settings, parent)]
    return rows


def show_communication(
    settings: RunSettings,
    parallel: SimulatedParallel,
    console: Console,
    train_step: TrainStep,
    parent: ParentRun | None = None,
) -> None:
    """Print the collectives of the first step of each stage, on each of the simulated processes.

    Args:
        train_step: that of train.py.
    """
    schedule = TrainingSchedule(settings)
    rows = []
    sizes = {"all": parallel.world, "context": settings.training.parallel.context}
    for stage in schedule.stages:
        size = schedule.micro_batch_size(stage)
        vocab_size = vocabulary_of(settings, parent)
        collectives = count_collectives(
            settings,
            parallel,
            stage,
            size,
            vocab_size,
            train_step,
        )
        name = f"{stage.batch_size} × {stage.length:,}"
        for (operation, group), traffic in collectives.items():
            sent = sent_bytes(operation, traffic.nbytes, sizes[group])
            processes = f"{sizes[group]} ({group})"
            rows.append(
                (
                    name,
                    operation,
                    processes,
                    f"{traffic.count:,}",
                    f"{traffic.nbytes:,}",
                    size_text(sent),
                )
            )
    console.table(
        "communication of each device in one step",
        ["windows × tokens", "collective", "processes", "number", "bytes", "sent in a ring"],
        rows,
    )


def after(plan: Sequence[Segment], done: int) -> list[Segment]:
    """The segments of a plan that remain after the first `done` steps."""
    left = []
    for segment in plan:
        done_here = min(done, segment.steps)
        done -= done_here
        left += (
            [segment._replace(steps=segment.steps - done_here)] if done_here < segment.steps else []
        )
    return left
