"""Everything that exists before the first step: settings, data, model and run directory."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from data import GeneratedData, PreparedData, RunData, is_prepared, prepare
from data.files import remove_drafts
from data.sampling.exposure import EXPOSURE
from data.sampling.item_batches import RunSampler
from errors import TrainingError
from model import Transformer
from model.devices import prepare_cpu
from run_directory.allowed_changes import check_text
from run_directory.checkpoints import clean_leftovers
from run_directory.console import Console
from run_directory.exposure import make_sampler
from run_directory.parent_run import ParentRun, read_run_settings
from run_directory.process_group import error_barrier
from run_directory.run import Run, check_writable, is_run, locked_run, rename_old_run
from run_directory.run_names import run_folder
from run_directory.run_settings import RunSettings
from run_directory.stages import stages_of
from run_directory.training_settings import TrainingSettings
from settings.load import dropped_settings, identity
from training.checks import (
    check_model,
    check_processes,
    check_sharding,
    input_limit,
    make_model,
)
from training.distributed.parallel import Parallel, autocast_type
from training.first_checkpoint import Score, check_optimizer_groups, write_first_checkpoint
from training.memory import check_memory
from training.precision import PRECISION, resolve_precision
from training.stop_requests import StopRequests


class ValidationTargets(Protocol):
    """Fixed held-out targets, as `evaluation.monitor` draws them."""

    @property
    def note(self) -> str: ...

    @property
    def documents(self) -> int: ...

    @property
    def hash(self) -> str: ...

    def nll(
        self,
        model: Transformer,
        length: int,
        device: torch.device,
    ) -> np.ndarray: ...

    def measure(
        self,
        model: Transformer,
        device: torch.device,
        rank: int,
        world: int,
        gather: Callable[[Any], list[Any]],
    ) -> dict[int, tuple[float, int]]:
        """{length: (mean NLL in nats, number of targets)}; NaN where a loss is not finite."""
        ...


DrawTargets = Callable[..., ValidationTargets]  # evaluation.monitor_targets


@dataclass(frozen=True)
class TrainingRun:
    """A run that is ready to train; its folder is locked by the main process.

    Attributes:
        model: with its initial weights, on the device.
        sampler: the batch of every step.
        targets: of the validation.
    """

    run: Run
    settings: RunSettings
    data: RunData
    sampler: RunSampler
    targets: ValidationTargets
    model: Transformer
    parallel: Parallel
    requests: StopRequests
    console: Console
    steps: int
    precision: str

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def device(self) -> torch.device:
        return self.parallel.device

    def begin_steps(self) -> None:
        """Wait for all processes; from here on, a signal saves a checkpoint before the process
        exits."""
        self.parallel.wait()
        self.requests.begin_steps()
        self.model.train()

    def report_stop(self, step: int) -> None:
        """Print why the run stops after `step` updates, and how to resume it."""
        received = self.requests.received
        name = received.name if received else "a signal to another process"
        self.console.info(
            f"stopped by {name} after step {step}; saved. Run the same command again to resume."
        )


@dataclass(frozen=True)
class Launch:
    """A run whose settings are checked and whose processes are connected.

    Attributes:
        folder: the run directory, which may not exist yet.
        precision: of the settings, or what `auto` resolves to in this run.
    """

    settings: RunSettings
    parent: ParentRun | None
    parallel: Parallel
    console: Console
    folder: Path
    precision: str


def launch(
    options: Namespace, make_parallel: Callable[[TrainingSettings], Parallel] = Parallel
) -> Launch:
    """Read the settings, join the other processes, and check what can be checked without data."""
    given = Path(options.run_dir) if options.run_dir else None
    settings, parent = read_run_settings(options.overrides, given)
    folder = given or run_folder(settings, options.overrides)
    if not options.dry_run:
        check_writable(folder)
    if parent is not None and settings.is_fork:
        check_optimizer_groups(parent, settings)
    t = settings.training
    prepare_cpu(t.num_threads)
    # The initial state of torch's generator is random and saved in checkpoints: a fixed seed makes
    # the checkpoints of equal runs equal.
    torch.manual_seed(settings.seed)
    parallel = make_parallel(t)
    console = Console(quiet=not parallel.main, results=options.dry_run)
    for warning in dropped_settings(settings, options.overrides):
        console.info(warning)
    check_processes(settings, parallel.world)
    parallel.agree(
        identity(settings),
        "the hash of the settings",
        "start all with the same files and overrides",
    )
    check_model(settings)
    existing = None if options.restart else folder
    precision = resolve_precision(settings, parent, existing, parallel, options.auto_precision)
    parallel.autocast_dtype = autocast_type(precision)
    return Launch(settings, parent, parallel, console, folder, precision)


@contextmanager
def open_run(
    options: Namespace, requests: StopRequests, draw_targets: DrawTargets
) -> Iterator[TrainingRun]:
    """Prepare the data, build the model, and create or reopen the run directory, which stays locked
    until the block ends. An extension run starts with a checkpoint of step 0."""
    launched = launch(options)
    settings = launched.settings
    parent = launched.parent
    parallel = launched.parallel
    console = launched.console
    folder = launched.folder
    if not options.force:
        check_memory(settings, parallel, parent)
    with parallel.connected(), ExitStack() as stack:
        data = parallel.main_first(lambda: _open_data(launched, options.overrides))
        if parent is not None:
            check_text(settings, data, parent.about["tokenizer_hash"])
        model = _initial_model(launched, data)
        check_sharding(settings, model, parallel.sharded)
        sampler = make_sampler(settings, data)
        targets = held_out_targets(draw_targets, data, settings, console)
        processes = parallel.description()
        run = Run(folder)
        with error_barrier(parallel, "begin"):
            if parallel.main:
                stack.enter_context(_locked(folder, options.restart, console))
                facts = run_facts(settings, data, model) | {PRECISION: launched.precision}
                run = _create_or_resume(launched, data, facts, processes)
                if settings.parent is not None:
                    score = step0_score(draw_targets, data, settings, parallel.device)
                    write_first_checkpoint(run, parent, model, score, console)
        yield TrainingRun(
            run=run,
            settings=settings,
            data=data,
            sampler=sampler,
            targets=targets,
            model=model,
            parallel=parallel,
            requests=requests,
            console=console,
            steps=settings.steps,
            precision=launched.precision,
        )


def _open_data(launched: Launch, arguments: Sequence[str]) -> RunData:
    """The prepared text; its hashes and ids are verified by the main process. A single process
    prepares it.

    Raises TrainingError, which names the command, where several processes find none.
    """
    settings = launched.settings
    parent = launched.parent
    parallel = launched.parallel
    if settings.parent is not None and parent is None:  # the parent is gone; the run has its text
        data = Run.open(launched.folder).open_data()
    else:
        if parallel.world > 1 and parallel.main and not is_prepared(settings.data):
            command = ["python", "scripts/prepare.py"]
            if parent is not None:
                command.append(str(parent.folder / "settings.yaml"))
            command += [word for word in arguments if not word.startswith("parent.")]
            raise TrainingError(
                f"the text is not prepared, and {parallel.world} processes were started: prepare "
                f"it first with {shlex.join(command)}"
            )
        data = prepare(settings.data, launched.console)
    if parallel.main:
        data.verify()
    return data


def _initial_model(launched: Launch, data: RunData) -> Transformer:
    settings = launched.settings
    vocab_size = data.tokenizer.vocab_size
    if launched.parent is not None:  # its vocabulary may be padded
        vocab_size = launched.parent.about["vocab_size"]
    elif settings.parent is not None:
        vocab_size = Run.open(launched.folder).vocab_size
    model = make_model(settings, vocab_size).initialize(settings.seed)
    is_double = settings.training.precision == "float64"
    dtype = torch.float64 if is_double else torch.float32
    return model.to(launched.parallel.device, dtype)


@contextmanager
def _locked(folder: Path, restart: bool, console: Console) -> Iterator[None]:
    """Lock the folder; with `restart`, rename the run in it first."""
    if restart and folder.exists():
        with locked_run(folder):  # an error where the run is being trained
            kept = rename_old_run(folder)
        console.info(f"the earlier run is kept as {kept}")
    with locked_run(folder):
        remove_drafts(folder)
        clean_leftovers(folder)
        yield


def _create_or_resume(launched: Launch, data: RunData, facts: dict, processes: dict) -> Run:
    """Create the run directory, or check that the existing one has these settings."""
    folder = launched.folder
    settings = launched.settings
    tokenizer = data.tokenizer
    if is_run(folder):
        run = Run(folder)
        for change in run.resume(settings, tokenizer, sys.argv, facts, processes):
            launched.console.info(f"changed since the last attempt: {change}")
        return run
    parent = launched.parent
    if parent is not None:
        facts |= {"lineage": parent.lineage(settings), "inherited": parent.inherited}
    return Run.create(folder, settings, tokenizer, sys.argv, facts, processes)


def held_out_targets(
    draw: DrawTargets, data: RunData, settings: RunSettings, console: Console
) -> ValidationTargets:
    """Held-out targets at the multiples of train_length that the model and the text allow."""
    v = settings.training.validation
    limit = input_limit(settings)
    if isinstance(data, PreparedData) and not data.valid.n_documents:
        raise TrainingError(
            f"{data.valid.folder} has no documents: raise data.valid_fraction or set "
            f"data.valid_source"
        )
    requested = [multiple * settings.train_length for multiple in v.multiples]
    if isinstance(data, GeneratedData):  # items of the lengths in training
        requested = [settings.train_length]
        limit = None
    lengths = [length for length in requested if limit is None or length <= limit]
    if lengths < requested:
        console.info(f"positions end at {limit}: validation uses the lengths {lengths} only")
    best = settings.training.checkpoint.best
    if best and best * settings.train_length not in lengths:
        raise TrainingError(
            f"training.checkpoint.best = {best} cannot be measured: validation has the lengths "
            f"{lengths}"
        )
    targets = draw(data, lengths, v.targets, v.spans, settings.seed)
    if targets.note:
        console.info(targets.note)
    return targets


def step0_score(
    draw: DrawTargets,
    data: RunData,
    settings: RunSettings,
    device: torch.device,
) -> Score:
    """A function that measures a model's NLL on each of some fixed held-out targets at
    train_length."""
    v = settings.training.validation
    length = settings.train_length
    targets = draw(data, [length], v.targets, v.spans, settings.seed)
    return lambda model: targets.nll(model, length, device)


def run_facts(
    settings: RunSettings,
    data: RunData,
    model: Transformer,
) -> dict:
    """What the manifest of a run records about its data and its model."""
    facts = {
        **data.facts(),
        "exposure": EXPOSURE,
        "parameters": model.parameter_count(),
        "vocab_size": model.vocab_size,
    }
    if changes := [stage for stage in stages_of(settings) if stage.overrides]:
        facts["changes"] = [
            {"after_step": stage.start, "overrides": list(stage.overrides)} for stage in changes
        ]
        facts["evaluated_as"] = changes[-1].model.positions_record()
    return facts
