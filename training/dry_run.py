"""What a run will take, told before anything is computed: `train.py --dry-run`."""

from collections.abc import Sequence
from functools import partial

import torch

from data import check_texts, expected_vocabulary
from data.windows import Portion
from training.announce import steps_in_words
from training.branch import Parent
from training.console import Console, duration
from training.fork import first_step, rates_in_words
from training.hardware import forecast, free_memory, peak_flops
from training.memory import FLOAT, Layout
from training.optimizer import who_learns_at
from training.parallel import Parallel
from training.settings import RunSettings
from training.stages import stages_of
from training.start import autocast_type, make_model, sampled


def lineage_words(lineage: list[dict]) -> list[str]:
    """A line for each checkpoint behind a branch, nearest first."""
    return [
        f"{one['run']}, step {one['step']:,} (checkpoint {one['checkpoint_hash'][:10]}), trained at "
        f"{one['train_length']} tokens"
        for one in lineage
    ]


def show_forecast(
    settings: RunSettings, parallel: Parallel, console: Console, parent: Parent | None = None
) -> int:
    """Size, memory and time of a run, before any compute. Returns an exit status: 1 where it will not fit.

    Raises DataError where its text is not there.
    """
    t, done, device = settings.training, first_step(settings), parallel.device
    if parent is not None or settings.parent is None:  # without its parent, a branch has its text already
        check_texts(settings.data)
    if not parallel.main:
        return 0
    vocab_size = parent.about["vocab_size"] if parent else expected_vocabulary(settings.data)
    with torch.device("meta"):
        model = make_model(settings, vocab_size)
    most = max(-(-p.batch_size * p.length // settings.train_length) for p in settings.plan)
    layout = Layout(
        world=parallel.world,
        sharded=parallel.sharded,
        sequences=min(t.micro_batch or most, -(-most // parallel.world)),
        checkpointing=t.parallel.activation_checkpointing,
        half=autocast_type(t.precision, device) is not None,
        device=device.type,
        mean=t.ema is not None,
        float_bytes=8 if t.precision == "float64" else FLOAT,
    )
    expected = partial(forecast, model, settings.train_length, layout=layout, peak=peak_flops(device))
    f, left = expected(plan=settings.plan), expected(plan=after(settings.plan, done))
    free, steps = free_memory(device), f"{f.steps:,} of {steps_in_words(settings)}"
    tokens, time = f"{f.tokens:,}", f"about {duration(f.seconds)}"
    if done:  # a fork: what is behind it has been paid for
        steps += f"; {left.steps:,} are left after step {done:,}"
        tokens += f"; {left.tokens:,} are left"
        time = f"about {duration(left.seconds)} for what is left ({duration(f.seconds)} for all steps)"
    changes = [stage for stage in stages_of(settings) if stage.words]
    rows = [
        ("parameters", f"{f.parameters:,}"),
        ("training FLOPs per token", f"{f.flops_per_token:.3g}"),
        ("steps", steps),
        ("tokens", tokens),
        ("positions of training text", sampled(settings)),
        *((f"after step {stage.start:,}", ", ".join(stage.words)) for stage in changes),
        ("memory on each device", f"about {_size(f.memory)}; {_size(free)} are free"),
        ("time", f"{time} on {layout.world} × {device.type}, at 45% of its peak rate"),
    ]
    rows += [
        (name, f"{rate:g}, {who_learns_at(name, model, t.optimizer)}")
        for name, rate in t.optimizer.rates.items()
    ]
    if parent is not None:
        is_fork = settings.parent is not None and settings.parent.fork
        first, *earlier = lineage_words(parent.lineage(settings))
        rows += [("fork of" if is_fork else "branch of", first), *(("behind it", one) for one in earlier)]
        rows += [("changed", text) for text in parent.changed(settings)]
        if is_fork:
            told = rates_in_words(parent.folder, parent.settings, settings, parent.checkpoint.step)
            rows += [("after the fork", text) for text in told]
    console.table("forecast", ["", ""], rows)
    if f.memory > free:
        console.warn(f"this will not fit: {', or '.join(_mends(layout))}")
        return 1
    return 0


def _mends(layout: Layout) -> list[str]:
    """What takes less memory and is not done yet."""
    mends = [f"lower training.micro_batch (now {layout.sequences})"] if layout.sequences > 1 else []
    if not layout.checkpointing:
        mends.append("set training.parallel.activation_checkpointing")
    if not layout.sharded:
        mends.append(
            "split the weights over several devices (training.parallel.sharding=full, docs/scaling.md)"
        )
    return [*mends, "take more devices" if layout.sharded else "take a smaller model"]


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def after(plan: Sequence[Portion], done: int) -> list[Portion]:
    """What a plan leaves after its first `done` steps."""
    left = []
    for portion in plan:
        passed = min(done, portion.steps)
        done -= passed
        left += [portion._replace(steps=portion.steps - passed)] if passed < portion.steps else []
    return left
