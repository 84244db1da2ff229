"""Everything that exists before the first step: command line, settings, data, model, run directory."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import torch

from data import BatchSampler, PreparedData, prepare
from data.preparation.groups import TextGroups
from data.sampling.exposure import EXPOSURE
from errors import TrainingError
from model import Transformer
from run_directory.run_settings import RunSettings
from settings.load import dropped_settings, identity
from training.distributed.error_barrier import error_barrier
from training.distributed.parallel import Parallel
from training.distributed.simulated import SimulatedParallel
from training.distributed.watchdog import Watchdog
from training.exposure import make_batches
from training.interrupts import Interrupts
from training.logging.console import Console
from training.run.checks import (
    autocast_type,
    check_model,
    check_processes,
    check_sharding,
    input_limit,
    make_model,
)
from training.run.compatibility import check_text
from training.run.directory import (
    check_writable,
    create_or_resume,
    open_run_data,
    read_manifest,
    run_folder,
)
from training.run.dry_run import check_memory, show_communication, show_forecast
from training.run.environment import processes_of
from training.run.first_checkpoint import Score, write_first_checkpoint
from training.run.hardware import prepare_cpu
from training.run.parent import ParentRun, read_run_settings
from training.simulated_step import TrainStep
from training.stages import stages_of


class ValidationTargets(Protocol):
    """Fixed held-out targets; `evaluation.MonitorTargets` implements this."""

    @property
    def note(self) -> str: ...

    @property
    def documents(self) -> int: ...

    @property
    def hash(self) -> str: ...

    def nll(self, model: Transformer, length: int, device: torch.device) -> np.ndarray: ...

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
    """A run that is ready to train. Its folder is locked by this process and its watchdog runs."""

    settings: RunSettings
    data: PreparedData
    batches: BatchSampler
    targets: ValidationTargets
    model: Transformer
    folder: Path
    parallel: Parallel
    watchdog: Watchdog
    interrupts: Interrupts
    console: Console

    @property
    def device(self) -> torch.device:
        return self.parallel.device

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast in forward passes; None: no autocast."""
        return autocast_type(self.settings.training.precision, self.device)

    def begin_steps(self) -> None:
        """Wait for all processes; from here on, a signal saves a checkpoint before the process exits."""
        self.parallel.wait()
        self.interrupts.begin_steps()
        self.model.train()

    def report_stop(self, step: int) -> None:
        """Print why the run stops after `step` updates, and how to resume it."""
        received = self.interrupts.received
        name = received.name if received else "a signal to another process"
        saved = f"after step {step}; saved" if step else "before the first step: nothing to save"
        self.console.info(f"stopped by {name} {saved}. Run the same command again to resume.")


def dry_run(options: Namespace, train_step: TrainStep) -> int:
    """Print the size, memory and time of a run, and with `--world` its communication; returns the exit
    status."""
    settings, parent, parallel, console = _launch(options)
    status = show_forecast(settings, parallel, console, parent)
    if isinstance(parallel, SimulatedParallel):
        show_communication(settings, parallel, console, train_step, parent)
    return status


@contextmanager
def open_run(
    options: Namespace, interrupts: Interrupts, draw_targets: DrawTargets
) -> Iterator[TrainingRun]:
    """Prepare the data, build the model, and create or reopen the run directory, which stays locked until the
    block ends. An extension run starts with a checkpoint of step 0."""
    settings, parent, parallel, console = _launch(options)
    if not options.force:
        check_memory(settings, parallel, parent)
    folder = Path(options.run_dir) if options.run_dir else run_folder(settings, options.overrides)
    check_writable(folder)

    def prepared() -> PreparedData:
        is_parent_gone = settings.parent is not None and parent is None
        data = open_run_data(folder) if is_parent_gone else prepare(settings.data, console)
        for store in (data.valid, *(text.train for text in data.texts)) if parallel.main else ():
            store.verify()
        return data

    attempt = parallel.gather(uuid4().hex)[0]
    timeout = settings.training.rank_timeout
    with Watchdog(folder, attempt, parallel.rank, parallel.world, timeout) as watchdog:
        data = parallel.main_first(prepared)
        if parent is not None:
            check_text(settings, data, parent.about["tokenizer_hash"])
        vocab_size = data.tokenizer.vocab_size
        if settings.parent is not None:  # its vocabulary may be padded
            vocab_size = (parent.about if parent else read_manifest(folder))["vocab_size"]
        model = make_model(settings, vocab_size).initialize(settings.seed)
        is_double = settings.training.precision == "float64"
        model.to(parallel.device, torch.float64 if is_double else torch.float32)
        check_sharding(settings, model, parallel.sharded)
        batches = make_batches(settings, data)
        targets = held_out_targets(draw_targets, data, settings, console)
        run = TrainingRun(
            settings, data, batches, targets, model, folder, parallel, watchdog, interrupts, console
        )
        processes = processes_of(parallel)
        with ExitStack() as stack:
            with error_barrier(parallel, "begin"):
                if parallel.main:
                    about = run_manifest(settings, data, model)
                    ancestry = {}
                    if parent is not None:
                        ancestry = {
                            "lineage": parent.lineage(settings),
                            "inherited": parent.inherited,
                        }
                    opened = (folder, settings, data.tokenizer, about, ancestry, processes)
                    stack.enter_context(
                        create_or_resume(*opened, restart=options.restart, console=console)
                    )
                stack.enter_context(batches.preparing(parallel.main))
                if settings.parent is not None and parallel.main:
                    score = step0_score(draw_targets, data, settings, parallel.device)
                    write_first_checkpoint(folder, settings, parent, model, score, console)
            yield run
        parallel.end()  # monitored by the watchdog, as a process may fail before it arrives here


def _launch(options: Namespace) -> tuple[RunSettings, ParentRun | None, Parallel, Console]:
    """Read the settings, join the other processes, and check what can be checked without data."""
    settings, parent = read_run_settings(
        options.overrides, options.run_dir and Path(options.run_dir)
    )
    prepare_cpu(settings.training.num_threads)
    # The initial state of torch's generator is random and saved in checkpoints: a fixed seed makes the
    # checkpoints of equal runs equal.
    torch.manual_seed(settings.seed)
    t = settings.training
    world = options.world
    parallel = Parallel(t) if world is None else SimulatedParallel(t, world)
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
    return settings, parent, parallel, console


def held_out_targets(
    draw: DrawTargets, data: PreparedData, settings: RunSettings, console: Console
) -> ValidationTargets:
    """Held-out targets at the multiples of train_length that the model and the text allow."""
    v = settings.training.validation
    limit = input_limit(settings)
    if not data.valid.n_documents:
        raise TrainingError(
            f"{data.valid.folder} has no documents: raise data.valid_fraction or set data.valid_source"
        )
    requested = [multiple * settings.train_length for multiple in v.multiples]
    lengths = [length for length in requested if limit is None or length <= limit]
    if lengths < requested:
        console.info(f"positions end at {limit}: validation uses the lengths {lengths} only")
    if (best := settings.training.checkpoint.best) and best * settings.train_length not in lengths:
        raise TrainingError(
            f"training.checkpoint.best = {best} cannot be measured: positions end at {limit}"
        )
    targets = draw(data.valid, lengths, v.targets, v.spans, settings.seed)
    if targets.note:
        console.info(targets.note)
    return targets


def step0_score(
    draw: DrawTargets, data: PreparedData, settings: RunSettings, device: torch.device
) -> Score:
    """A function that measures a model's NLL on each of some fixed held-out targets at train_length."""
    v = settings.training.validation
    length = settings.train_length
    targets = draw(data.valid, [length], v.targets, v.spans, settings.seed)
    return lambda model: targets.nll(model, length, device)


def run_manifest(settings: RunSettings, data: PreparedData, model: Transformer) -> dict:
    """What the manifest of a run records about its data and its model."""
    manifest = {
        "data": str(data.folder),
        "data_hash": data.hash,
        "valid_hash": data.valid.hash,
        "exposure": EXPOSURE,
        "parameters": model.parameter_count(),
        "vocab_size": model.vocab_size,
    }
    if settings.data.group_bytes is not None:
        manifest["groups"] = str(TextGroups(settings.data, data).list)
    if data.others:
        manifest["mixture"] = [str(text.folder) for text in data.others]
    if changes := [stage for stage in stages_of(settings) if stage.overrides]:
        manifest["changes"] = [
            {"after_step": stage.start, "overrides": list(stage.overrides)} for stage in changes
        ]
        manifest["evaluated_as"] = changes[-1].model.position.model_dump(mode="json")
    return manifest
