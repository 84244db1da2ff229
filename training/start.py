"""What happens before the first step: the model, the run folder, and what is refused."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data import Prepared
from data.exposure import EXPOSURE
from data.groups import Groups
from model import SCHEMES, Transformer
from training.console import Console
from training.describe import help_text
from training.errors import TrainingError
from training.fork import first_step
from training.mirrors import check_mirrors
from training.monitor import due_looks
from training.optimizer import learnt_by_positions
from training.run import create_run, held, is_run, resume_run, set_aside
from training.settings import RunSettings
from training.stages import stages_of


def parse(usage: str) -> argparse.Namespace:
    """The command line of train.py; `--help` lists every setting."""
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("words", nargs="*", metavar="FILE.yaml | key.inner=value")
    parser.add_argument(
        "--folder", metavar="FOLDER", help="run folder; by default runs/<config>-<hash of settings>"
    )
    parser.add_argument(
        "--fork",
        metavar="RUN",
        help="go on from RUN's newest checkpoint (or parent.checkpoint=STEP) in a new run folder under "
        "changed settings, with optimizer, steps and order of the data; what is not said is as in RUN",
    )
    parser.add_argument("--fresh", action="store_true", help="start anew; the old run folder is kept aside")
    parser.add_argument("--dry-run", action="store_true", help="print size, memory and time; train nothing")
    more = "this text, with every setting; --help SETTING: that setting and those inside it alone"
    parser.add_argument("-h", "--help", action="store_true", help=more)
    options = parser.parse_intermixed_args()  # words may stand on both sides of an option
    if options.help:
        print(help_text(RunSettings, options.words, parser.format_help(), "training.checkpoint"))
        sys.exit(0)
    if options.fork:
        options.words += [f"parent.run={options.fork}", "parent.fork=true"]
    return options


def make_model(settings: RunSettings, vocab_size: int) -> Transformer:
    return Transformer(settings.model, vocab_size, settings.train_length, settings.original_length)


def reach_of(settings: RunSettings) -> int | None:
    """The longest input that the model can place at every stage of the run; None where there is no end.

    Raises ModelError or TrainingError for a stage that cannot work; nothing is allocated.
    """
    with torch.device("meta"):
        stages = [settings.model_copy(update={"model": stage.model}) for stage in stages_of(settings)]
        limits = [make_model(stage, vocab_size=1).limit for stage in stages]
    return min((limit for limit in limits if limit is not None), default=None)


def check_model(settings: RunSettings) -> None:
    """Refuse a shape, a scheme, a change of it or a look at it that cannot work, and steps that never come,
    before any data are read."""
    limit = reach_of(settings)
    length, shortest = settings.train_length, min(settings.training.validation.multiples)
    if limit is not None and limit < length:
        raise TrainingError(
            f"train_length {length} is longer than the {limit} positions this scheme has: shorten it, or "
            f"raise {_end_of(settings, length)}"
        )
    if limit is not None and limit < shortest * length:
        raise TrainingError(
            f"training.validation.multiples begins at {shortest} × {length} tokens, and positions end at "
            f"{limit}: add 1 to it"
        )
    _check_sampler(settings, limit)
    _check_steps(settings)
    due_looks(settings.training.validation, settings.steps)
    check_mirrors(settings.training)


def _check_steps(settings: RunSettings) -> None:
    """Refuse to keep checkpoints, or trace steps, that the run will not have."""
    c, trace = settings.training.checkpoint, settings.training.profile
    if c.keep_every is not None and c.every is None:
        raise TrainingError("training.checkpoint.keep_every needs checkpoints on the way: give every too")
    if c.keep_every is not None and c.every is not None and c.keep_every % c.every:
        raise TrainingError(
            f"training.checkpoint.keep_every = {c.keep_every}: checkpoints are written every {c.every} "
            f"steps; make it a multiple of that, such as {-(-c.keep_every // c.every) * c.every}"
        )
    first, last = first_step(settings), settings.steps
    if trace is not None and not first - trace.steps < trace.start < last:
        raise TrainingError(
            f"training.profile.start = {trace.start} traces none of the steps this run takes: give {first} "
            f"to {last - 1}"
        )


def _check_sampler(settings: RunSettings, limit: int | None) -> None:
    """Refuse positions that are drawn where a scheme has none: between whole numbers, or past its end."""
    sampler = settings.data.positions
    for kind, choice in settings.model.kinds.items():
        if sampler.fractional and not getattr(SCHEMES[choice.name][1], "takes_fractions", True):
            where = "model.position" if kind == "all" else f"model.position.kinds.{kind}"
            raise TrainingError(
                f"data.positions.name = {sampler.name} draws positions between whole numbers, where "
                f"{where}.name = {choice.name} has none: choose another of the two"
            )
    reach = sampler.reach(settings.train_length)
    if limit is not None and limit < reach:
        raise TrainingError(
            f"data.positions ({sampled(settings)}) draws positions up to {reach - 1}, and positions end at "
            f"{limit - 1}: raise {_end_of(settings, reach)}, or draw positions less far"
        )


def _end_of(settings: RunSettings, reach: int) -> str:
    """The setting that moves the end of the positions, for an error."""
    for kind, choice in settings.model.kinds.items():
        where = "model.position" if kind == "all" else f"model.position.kinds.{kind}"
        for key, value in (("max_length", f" to {reach}"), ("scale_base", "")):
            if key in type(choice).model_fields:
                return f"{where}.{key}{value}"
    return "model.dim"


def sampled(settings: RunSettings) -> str:
    """The sampler of positions in words: `pose: target 2048`."""
    said = settings.data.positions.model_dump()
    name = said.pop("name")
    inside = ", ".join(f"{key} {str(value).lower()}" for key, value in said.items())
    return f"{name}: {inside}" if inside else name


def check_processes(settings: RunSettings, processes: int) -> None:
    """Refuse a batch that the ranks cannot share equally, before any data are read."""
    for i, portion in enumerate(settings.plan):
        if portion.batch_size % processes:
            where = (
                f"training.stages.{i}: a batch_size of" if settings.training.stages else "training.batch_size"
            )
            raise TrainingError(
                f"{where} {portion.batch_size} cannot be shared by {processes} processes; make it a multiple "
                f"of {processes}"
            )


def check_sharding(settings: RunSettings, model: Transformer, sharded: bool) -> None:
    """Refuse what cannot be had of a sharded model: an exchange of schemes whose positions learn, as their
    shards stay behind."""
    if sharded and learnt_by_positions(model) and any(stage.words for stage in stages_of(settings)):
        raise TrainingError(
            "training.changes exchanges positions that learn, whose weights cannot be split then: set "
            "training.parallel.sharding to none"
        )


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 where it is asked for, or on its own account on a GPU that computes in it; else None."""
    # Without `including_emulation=False` older GPUs answer yes, and compute in it many times slower.
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    own = precision == "auto" and native
    return torch.bfloat16 if precision == "bfloat16" or own else None


@contextmanager
def opened_run(
    folder: Path,
    settings: RunSettings,
    prepared: Prepared,
    model: Transformer,
    fresh: bool,
    console: Console,
    more: dict | None = None,
    processes: dict | None = None,
) -> Iterator[None]:
    """Make the run folder, or check that the one that is there may go on; held until the end. `more` goes
    into the manifest of a new one, `processes` into that of the attempt."""
    if fresh and folder.exists():
        with held(folder):  # refuses to set aside a run that is being trained
            away = set_aside(folder)
        console.say(f"the earlier run is kept as {away}")
    with held(folder):
        _open(folder, settings, prepared, model, console, more or {}, processes)
        yield


def _open(
    folder: Path,
    settings: RunSettings,
    prepared: Prepared,
    model: Transformer,
    console: Console,
    more: dict,
    processes: dict | None,
) -> None:
    extra = {
        "data": str(prepared.folder),
        "data_hash": prepared.hash,
        "valid_hash": prepared.valid.hash,
        "exposure": EXPOSURE,
        "parameters": model.parameter_count(),
    }
    if settings.data.group_bytes is not None:
        extra["groups"] = str(Groups(settings.data, prepared).list)
    if prepared.others:
        extra["mixture"] = [str(text.folder) for text in prepared.others]
    if changes := [stage for stage in stages_of(settings) if stage.words]:
        extra["changes"] = [{"after_step": stage.start, "words": list(stage.words)} for stage in changes]
        extra["evaluated_as"] = changes[-1].model.position.model_dump(mode="json")
    if not is_run(folder):
        create_run(folder, settings, prepared.tokenizer, sys.argv, extra | more, processes)
        return
    for change in resume_run(folder, settings, prepared.tokenizer, sys.argv, extra, processes):
        console.say(f"changed since the last attempt: {change}")


def sequences_at_once(settings: RunSettings, length: int) -> int | None:
    """Windows of `length` tokens per device and forward pass: as many tokens as training.micro_batch says."""
    size = settings.training.micro_batch
    return None if size is None else max(1, size * settings.train_length // length)
