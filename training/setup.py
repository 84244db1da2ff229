"""Everything that exists before the first step: settings, processes, data, model and run
directory."""

import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from data import GeneratedData, PreparedData, RunData, is_prepared
from data.files import remove_drafts
from errors import TrainingError
from model import Transformer
from model.devices import prepare_cpu
from run_directory.checkpoints import (
    clean_leftovers,
    copy_checkpoint,
    save_checkpoint,
    steps_of,
)
from run_directory.console import Console
from run_directory.parent_run import ParentRun, read_run_settings
from run_directory.position_overrides import make_model
from run_directory.precision import auto_precision, resolve_precision
from run_directory.process_group import error_barrier
from run_directory.run import Run, check_writable, is_run, locked_run, rename_old_run
from run_directory.run_names import run_folder
from run_directory.run_settings import RunSettings
from run_directory.weights import load_weights, weights_of
from settings.load import identity
from training.description import describe_parent, describe_run
from training.feasibility import check_model, check_processes, input_limit
from training.hardware import peak_memory
from training.memory_estimate import MemoryEstimate
from training.micro_batches import RunSampler, make_sampler
from training.parallel import Parallel, PlannedProcesses, autocast_type
from training.stop_requests import StopRequests


class TrainingRun:
    """A run whose settings are checked and whose processes are connected.

    Attributes:
        parent: the run that it starts from; None: a run from scratch.
        folder: the run directory, which may not exist before `open`.

    In the block of `open`, also:
        run: the run directory, locked by the main process.
        data: the prepared text; `sampler`: the batch of every step.
        model: the model with its initial weights, on the device.
        targets: the targets of validation, drawn by `monitor_targets` of evaluation/monitor.py.
    """

    run: Run
    data: RunData
    sampler: RunSampler
    model: Transformer
    targets: Any

    def __init__(self, options: Namespace, requests: StopRequests):
        """Read the settings, join the other processes, and check what can be checked without data.
        With --world, the processes are only planned, and the run cannot `open`."""
        self.options = options
        self.requests = requests
        given = Path(options.run_dir) if options.run_dir else None
        settings, self.parent = read_run_settings(
            options.overrides, given, resumes=not options.restart
        )
        t = settings.training
        prepare_cpu(t.num_threads)
        # The initial state of torch's generator is random and saved in checkpoints: a fixed seed
        # makes the checkpoints of equal runs equal.
        torch.manual_seed(settings.seed)
        planned: Any = PlannedProcesses
        world = options.world
        self.parallel: Parallel = Parallel(t) if world is None else planned(t, world)
        self.device = self.parallel.device
        self.settings, self.folder = resolve_precision(
            settings,
            lambda resolved: given or run_folder(resolved, options.overrides),
            self._auto_precision,
            options.restart,
        )
        settings = self.settings
        self.steps = settings.steps
        if not options.dry_run:
            check_writable(self.folder)
        self.console = Console(quiet=not self.parallel.main, results=options.dry_run)
        check_processes(settings, self.parallel)
        self.parallel.agree(
            identity(settings),
            "the hash of the settings",
            "start all with the same files and overrides",
        )
        check_model(settings)
        self.parallel.autocast_dtype = autocast_type(settings.training.precision)

    def _auto_precision(self, settings: RunSettings) -> str:
        """The precision for `training.precision=auto`, which the device of the main process
        determines."""
        if self.parallel.device_type != self.device.type:  # planned GPUs
            return "bfloat16"
        return self.parallel.gather(auto_precision(settings, self.device))[0]

    @contextmanager
    def open(self, draw_targets: Callable[..., Any]) -> Iterator[None]:
        """Prepare the data, build the model, and create or reopen the run directory, which stays
        locked until the block ends. An extension run starts with a checkpoint of step 0.

        Args:
            draw_targets: `monitor_targets` of evaluation/monitor.py.
        """
        parallel = self.parallel
        if not self.options.force:
            MemoryEstimate(self.settings, parallel, self.parent).check()
        with parallel.connected(), ExitStack() as stack:
            self.data = parallel.main_first(self._open_data)
            parallel.agree(
                (self.data.hash, self.data.valid_hash),
                "the hash of the training and validation text",
                "copy the prepared folder of the first machine to the others",
            )
            if self.parent is not None:
                self.parent.check_text(self.settings, self.data)
            self.sampler = make_sampler(self.settings, self.data)
            self.targets = self._held_out_targets(draw_targets)
            self.model = self._initial_model()
            processes = parallel.description()
            self.run = Run(self.folder)
            with error_barrier(parallel, "begin"):
                if parallel.main:
                    stack.enter_context(self._locked())
                    self._create_or_resume(processes)
                    if self.parent is not None and not steps_of(self.folder):
                        self._write_first_checkpoint(self.parent)
            yield

    def _open_data(self) -> RunData:
        """The prepared text; its hashes and ids are verified by the main process. A single process
        prepares it.

        Raises TrainingError if there are several processes and no prepared text.
        """
        settings = self.settings
        parallel = self.parallel
        if self.parent is not None and self.parent.is_gone:
            data = Run.open(self.folder).open_data()
        else:
            if parallel.world > 1 and parallel.main and not is_prepared(settings.data):
                raise TrainingError(
                    f"the text is not prepared, and {parallel.world} processes were started: run "
                    "scripts/prepare.py first, with the same files and overrides (for an extension "
                    "run also settings.yaml of its parent)"
                )
            from data.preparation.preparation import prepare  # --help and --dry-run do without it

            data = prepare(settings.data, self.console)
        if parallel.main:
            data.verify()
        return data

    def _held_out_targets(self, draw_targets: Callable[..., Any]) -> Any:
        """Held-out targets at the multiples of train_length that the model and the text allow."""
        settings = self.settings
        data = self.data
        v = settings.training.validation
        limit = input_limit(settings)
        if isinstance(data, PreparedData) and not data.valid.n_documents:
            raise TrainingError(
                f"{data.valid.folder} has no documents: raise data.valid_fraction or set "
                "data.valid_source"
            )
        requested = [multiple * settings.train_length for multiple in v.multiples]
        if isinstance(data, GeneratedData):  # the items have the lengths of training
            requested = [settings.train_length]
            limit = None
        lengths = [length for length in requested if limit is None or length <= limit]
        if lengths != requested:
            self.console.info(f"positions end at {limit}: validation uses the lengths {lengths}")
        targets = draw_targets(data, lengths, v.targets, v.spans, settings.seed)
        if targets.note:
            self.console.info(targets.note)
        return targets

    def _initial_model(self) -> Transformer:
        settings = self.settings
        vocab_size = self.data.tokenizer.vocab_size
        if self.parent is not None:  # the parent's vocabulary may be padded
            vocab_size = self.parent.manifest["vocab_size"]
        model = make_model(settings, vocab_size).initialize(settings.seed)
        is_double = settings.training.precision == "float64"
        return model.to(self.device, torch.float64 if is_double else torch.float32)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder; with --restart, rename the run in it first."""
        folder = self.folder
        if self.options.restart and folder.exists():
            with locked_run(folder):  # raises an error if the run is being trained
                kept = rename_old_run(folder)
            self.console.info(f"the earlier run is kept as {kept}")
        with locked_run(folder):
            remove_drafts(folder)
            clean_leftovers(folder)
            yield

    def _create_or_resume(self, processes: dict) -> None:
        """Create the run directory, or check that the existing one has these settings."""
        settings = self.settings
        data = self.data
        facts = {
            **data.facts(),
            "parameters": self.model.parameter_count(),
            "vocab_size": self.model.vocab_size,
        }
        command = self.options.command
        if is_run(self.folder):
            changed = self.run.resume(settings, data.tokenizer, command, facts, processes)
            for text in changed:
                self.console.info(f"changed since the last attempt: {text}")
            return
        if self.parent is not None:
            facts["lineage"] = self.parent.lineage(settings)
            facts["inherited"] = self.parent.inherited
        self.run = Run.create(self.folder, settings, data.tokenizer, command, facts, processes)

    def _write_first_checkpoint(self, parent: ParentRun) -> None:
        """Write the first checkpoint of an extension run or a fork: for a fork, the parent's
        checkpoint as it is, with its optimizer; for an extension run, the parent's weights as step
        0. Called by one process."""
        if parent.is_gone:
            raise TrainingError(
                f"{self.folder} has no checkpoint, and its parent's is gone: restore parent.run"
            )
        if self.settings.is_fork:
            copy_checkpoint(parent.checkpoint, self.folder)
            return
        load_weights(self.model, parent.checkpoint.folder)
        tensors = {
            "model": weights_of(self.model),
            "optimizer": {"generator/cpu": torch.get_rng_state()},
        }
        save_checkpoint(self.folder, 0, tensors, {"step": 0, "tokens": 0})

    def announce(self, step: int) -> None:
        """Print the model, data and schedule before the first update, which follows `step`
        others."""
        info = self.console.info
        info(f"run {self.folder}")
        rows = describe_run(self.settings, self.model)
        for text, passes in self.sampler.passes(self.steps).items():
            rows.append(("epochs", f"{passes:.2f} of {text}"))
        if self.parent is not None and step == self.settings.first_step:
            rows += describe_parent(self.settings, self.parent)
        elif step:
            rows.append(("resuming", f"after step {step} of {self.steps}"))
        for label, text in rows:
            info(f"{label} {text}")

    def announce_end(self, prompts: list[str]) -> None:
        """Print the end of a completed run, and commands to evaluate it."""
        info = self.console.info
        info(f"done: {self.folder} (peak memory {peak_memory(self.device) / 2**20:,.0f} MiB)")
        prompt = shlex.quote(prompts[0] if prompts else "")
        run = shlex.quote(str(self.folder))
        info(f"next: python evaluate.py {run}   or   python generate.py {run} --prompt {prompt}")

    def begin_steps(self) -> None:
        """Wait for all processes; from here on, a signal saves a checkpoint before the process
        exits."""
        self.parallel.wait()
        self.requests.begin_steps()
        self.model.train()

    def announce_stop(self, step: int) -> None:
        """Print why the run stops after `step` updates, and how to resume it."""
        received = self.requests.received
        name = received.name if received else "a signal to another process"
        self.console.info(
            f"stopped by {name} after step {step}; saved. Run the same command again to resume."
        )
