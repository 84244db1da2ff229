"""Estimates parameters, memory and time of a run before it starts: `train.py --dry-run`."""

from collections.abc import Sequence
from functools import partial

import torch

from data import check_texts, expected_vocabulary
from data.sampling.segments import Segment
from errors import TrainingError
from model import Transformer
from run_directory.run_settings import RunSettings
from training.distributed.parallel import Parallel
from training.distributed.simulated import SimulatedParallel, sent_bytes
from training.logging.console import Console, duration
from training.logging.summary import steps_in_words
from training.optim.optimizer import parameters_at_rate
from training.run.checks import autocast_type, make_model, sampled
from training.run.first_checkpoint import changed_rates
from training.run.hardware import forecast, free_memory, peak_flops
from training.run.memory import FLOAT, MemoryLayout, fitting, memory
from training.run.parent import ParentRun
from training.simulated_step import TrainStep, count_collectives, simulated_autocast
from training.stages import TrainingSchedule, stages_of


def show_forecast(
    settings: RunSettings, parallel: Parallel, console: Console, parent: ParentRun | None = None
) -> int:
    """Print the estimated size, memory and time of a run. Returns an exit status: 1 where it does not fit.

    Raises DataError where its text does not exist.
    """
    t = settings.training
    done = settings.first_step
    device = parallel.device
    if parent is not None or settings.parent is None:  # without its parent: already prepared
        check_texts(settings.data)
    if not parallel.main:
        return 0
    model, layout = _shape(settings, parallel, parent)
    parts = memory(model, settings.train_length, layout)
    is_simulated = isinstance(parallel, SimulatedParallel)
    peak = 1.0 if is_simulated else peak_flops(device)  # of GPUs that are not known
    expected = partial(forecast, model, settings.train_length, layout=layout, peak=peak)
    f = expected(plan=settings.plan)
    left = expected(plan=after(settings.plan, done))
    free = free_memory(device)
    steps = f"{f.steps:,} of {steps_in_words(settings)}"
    tokens = f"{f.tokens:,}"
    time = f"about {duration(f.seconds)}"
    if done:  # a fork: its parent has trained the first steps
        steps += f"; {left.steps:,} are left after step {done:,}"
        tokens += f"; {left.tokens:,} are left"
        time = (
            f"about {duration(left.seconds)} for what is left ({duration(f.seconds)} for all steps)"
        )
    changes = [stage for stage in stages_of(settings) if stage.overrides]
    rows = [
        ("parameters", f"{f.parameters:,}"),
        ("training FLOPs per token", f"{f.flops_per_token:.3g}"),
        ("steps", steps),
        ("tokens", tokens),
        ("positions of training text", sampled(settings)),
        *((f"after step {stage.start:,}", ", ".join(stage.overrides)) for stage in changes),
    ]
    if is_simulated:
        of_device = layout.sequences, settings.train_length // layout.context, settings.model.dim
        rows += [
            ("activations of a layer, each device", " × ".join(f"{n:,}" for n in of_device)),
            ("memory on each device", f"about {_size(f.memory)}"),
            ("of which", ", ".join(f"{name} {_size(n)}" for name, n in parts.items() if n)),
            ("training FLOPs, each device", f"{f.tokens * f.flops_per_token / layout.world:.3g}"),
        ]
    else:
        rows += [
            ("memory on each device", f"about {_size(f.memory)}; {_size(free)} are free"),
            ("time", f"{time} on {layout.world} × {device.type}, at 45% of its peak rate"),
        ]
    rows += [
        (name, f"{rate:g}, {parameters_at_rate(name, model, t.optimizer)}")
        for name, rate in t.optimizer.rates.items()
    ]
    if parent is not None:
        first, *earlier = (
            f"{one['run']}, step {one['step']:,} (checkpoint {one['checkpoint_hash'][:10]}), trained at "
            f"{one['train_length']} tokens"
            for one in parent.lineage(settings)
        )
        rows += [
            ("fork of" if settings.is_fork else "extension of", first),
            *(("before it", one) for one in earlier),
        ]
        rows += [("changed", text) for text in parent.changed(settings)]
        if settings.is_fork:
            rows += [("after the fork", text) for text in changed_rates(settings, parent)]
    console.table("forecast", ["", ""], rows)
    if f.memory > free and not is_simulated:
        console.warn(f"this will not fit: {_fixes(model, settings, layout, free)}")
        return 1
    return 0


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
        size = schedule.micro_batch_size(stage.start)
        vocab_size = _vocabulary(settings, parent)
        found = count_collectives(settings, parallel, stage, size, vocab_size, train_step)
        name = f"{stage.batch_size} × {stage.length:,}"
        for (operation, group), traffic in found.items():
            sent = sent_bytes(operation, traffic.nbytes, sizes[group])
            processes = f"{sizes[group]} ({group})"
            rows.append(
                (
                    name,
                    operation,
                    processes,
                    f"{traffic.count:,}",
                    f"{traffic.nbytes:,}",
                    _size(sent),
                )
            )
    console.table(
        "communication of each device in one step",
        ["windows × tokens", "collective", "processes", "number", "bytes", "sent in a ring"],
        rows,
    )


def check_memory(
    settings: RunSettings, parallel: Parallel, parent: ParentRun | None = None
) -> None:
    """Raise TrainingError for a run that needs more than the free memory of its devices, before training.
    Every process must call it."""
    model, layout = _shape(settings, parallel, parent)
    needed = sum(memory(model, settings.train_length, layout).values())
    free = min(parallel.gather(free_memory(parallel.device)))
    if needed > free:
        raise TrainingError(
            f"this will not fit: about {_size(needed)} are needed on each device, {_size(free)} are free; "
            f"{_fixes(model, settings, layout, free)}, or pass --force to train anyway"
        )


def _shape(
    settings: RunSettings, parallel: Parallel, parent: ParentRun | None
) -> tuple[Transformer, MemoryLayout]:
    """The model of a run on the meta device, and its layout on the devices."""
    t = settings.training
    device = parallel.device.type
    autocast = autocast_type(t.precision, parallel.device)
    if isinstance(parallel, SimulatedParallel):  # of GPUs
        device = "cuda"
        autocast = simulated_autocast(t.precision)
    with torch.device("meta"):
        model = make_model(settings, _vocabulary(settings, parent))
    most = max(-(-p.batch_size * p.length // settings.train_length) for p in settings.plan)
    return model, MemoryLayout(
        world=parallel.world,
        sharded=parallel.sharded,
        sequences=min(t.micro_batch_size or most, -(-most // parallel.data_world)),
        checkpointing=t.parallel.checkpointing,
        half=autocast is not None,
        device=device,
        mean=t.ema is not None,
        float_bytes=8 if t.precision == "float64" else FLOAT,
        step_sequences=most,
        context=t.parallel.context,
    )


def _vocabulary(settings: RunSettings, parent: ParentRun | None) -> int:
    return parent.about["vocab_size"] if parent else expected_vocabulary(settings.data)


def _fixes(model: Transformer, settings: RunSettings, layout: MemoryLayout, free: float) -> str:
    """Suggest settings, not yet in use, that reduce memory."""
    fixes = []
    if fits := fitting(model, settings.train_length, layout, free):
        size = f"training.micro_batch_size={fits[0]} (now {layout.sequences})"
        if fits[1] < layout.step_sequences:
            size = f"training.batch_size={fits[1]} (now {layout.step_sequences}) and {size}"
        fixes.append(f"set {size}")
    if layout.checkpointing != "full":
        fixes.append("set training.parallel.activation_checkpointing=true")
    if not layout.sharded:
        fixes.append(
            "split the weights over several devices (training.parallel.sharding=full, docs/scaling.md)"
        )
    return ", or ".join([*fixes, "take more devices" if layout.sharded else "take a smaller model"])


def _size(n: float) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


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
