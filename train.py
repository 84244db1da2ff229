"""Train one model: settings → text → model → steps → checkpoints.

The same command run again resumes where the last checkpoint left off. Several YAML files may stand on one
line and are laid over each other, dotted words last:

  python train.py configs/tiny.yaml
  python train.py configs/small.yaml configs/position/alibi.yaml configs/data/folder.yaml training.tokens=200M
  python train.py configs/extension/yarn.yaml parent.run=runs/quickstart      a branch of a trained run
  python train.py training.tokens=30M --fork runs/tiny-012345678     it goes on, changed
  accelerate launch --config_file configs/accelerate/one_node.yaml train.py configs/base.yaml
"""

from argparse import Namespace
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch

from data import Batches, Prepared, prepare
from data.exposure import write_exposure
from evaluation import MonitorTargets, monitor_targets
from model import Transformer
from training.announce import announce, say_done
from training.average import Average
from training.begin import Score, begin_branch, check_text, groups_behind
from training.branch import read_run_settings
from training.checkpoint import find_checkpoint
from training.config import discarded, identity
from training.console import Console, run_main
from training.dry_run import show_forecast
from training.errors import TrainingError
from training.exposure import make_batches, make_ledger, with_parents
from training.files import read_json
from training.gate import Gate
from training.group import as_one
from training.hardware import peak_flops, peak_memory, prepare_cpu
from training.interrupts import Interrupts
from training.loop import Stepper, micro_batches
from training.machine import processes_of
from training.monitor import due_looks, validate, write_samples
from training.optimizer import make_optimizer, set_learning_rates
from training.parallel import Parallel
from training.profile import Tracer
from training.record import Recorder
from training.restore import restore
from training.retention import HELD_OUT, held_out_state
from training.run import MANIFEST, run_folder, text_of
from training.saving import Saver
from training.settings import RunSettings
from training.stages import learning_rates, stage_after, stage_of, stages_of
from training.start import (
    autocast_type,
    check_model,
    check_processes,
    check_sharding,
    make_model,
    opened_run,
    parse,
    reach_of,
    sequences_at_once,
)
from training.supply import Supply
from training.watch import Watch


def main() -> int:
    assert __doc__
    options = parse(__doc__)
    with Interrupts() as interrupts:
        return run(options, interrupts)


def run(options: Namespace, interrupts: Interrupts) -> int:
    """Everything before the first step, and then `train`; returns the exit status."""
    settings, parent = read_run_settings(options.words, options.folder and Path(options.folder))
    t = settings.training
    prepare_cpu(t.threads)
    # torch seeds its own generator by chance in every process, and a checkpoint keeps its state: without
    # this, no two trainings would give the same checkpoint.
    torch.manual_seed(settings.seed)
    parallel = Parallel(t)
    device = parallel.device
    console = Console(quiet=not parallel.main)
    for dropped in discarded(settings, options.words):
        console.say(dropped)
    check_processes(settings, parallel.world)
    parallel.agree(identity(settings), "the hash of the settings", "start all with the same words and files")
    check_model(settings)
    if options.dry_run:
        return show_forecast(settings, parallel, console, parent)

    folder = Path(options.folder) if options.folder else run_folder(settings, options.words)
    attempt = parallel.gather(uuid4().hex)[0]
    with Watch(folder, attempt, parallel.rank, parallel.world, t.rank_timeout) as watch, ExitStack() as stack:

        def find_text() -> Prepared:
            is_alone = settings.parent is not None and parent is None
            found = text_of(folder) if is_alone else prepare(settings.data, console)
            if parallel.main:
                for store in (found.valid, *(text.train for text in found.texts)):
                    store.verify()
            return found

        prepared = parallel.main_first(find_text)  # the others find the work done
        if parent is not None:
            check_text(settings, prepared, parent.about["tokenizer_hash"])
        model = make_model(settings, prepared.tokenizer.vocab_size).initialise(settings.seed)
        model.to(device, torch.float64 if t.precision == "float64" else torch.float32)
        check_sharding(settings, model, parallel.sharded)
        batches = make_batches(settings, prepared)
        monitor = make_monitor(prepared, settings, console)
        more = {"lineage": parent.lineage(settings), "inherited": parent.inherited} if parent else {}
        together = processes_of(parallel)
        opened = opened_run(folder, settings, prepared, model, options.fresh, console, more, together)
        with as_one(parallel, "begin"):
            if parallel.main:
                stack.enter_context(opened)
            stack.enter_context(batches.preparing(parallel.main))
            if settings.parent is not None and parallel.main:
                score = step0_score(prepared, settings, device)
                begin_branch(folder, settings, parent, model, score, console)
        about = (settings, prepared, batches, monitor, model, folder)
        status = train(*about, parallel, watch, interrupts, console)
    parallel.end()
    return status


def train(
    settings: RunSettings,
    prepared: Prepared,
    batches: Batches,
    monitor: MonitorTargets,
    model: Transformer,
    folder: Path,
    parallel: Parallel,
    watch: Watch,
    interrupts: Interrupts,
    console: Console,
) -> int:
    """Train from the newest good checkpoint to the end of the budget; returns the exit status."""
    t, device, main_process = settings.training, parallel.device, parallel.main
    autocast = autocast_type(t.precision, device)
    wrapped = parallel.wrap(model, compiled=t.compile, autocast=autocast)
    optimizer = make_optimizer(model, t.optimizer)
    found = find_checkpoint(folder, console if main_process else None)
    average = Average(model, t.ema, settings.steps) if t.ema else None
    state: dict = restore(model, optimizer, found, average) if found else {"step": 0}
    start: int = state["step"]
    parallel.agree(start, "the newest checkpoint", "the run folder must lie on a disk that all of them see")
    stages = stages_of(settings)
    model.reposition(stage_after(stages, start).model)
    announce(settings, model, batches, folder, start, console)
    gate = Gate(t.on_nonfinite, t.on_spike, device)
    gate.load(state.get("gate", {}))
    more = {"gate": gate, "z_loss": t.z_loss, "average": average}
    train_step = Stepper(parallel, wrapped, optimizer, clip=t.clip, autocast=autocast, **more)
    recorder = Recorder(
        folder,
        settings,
        start,
        main=main_process,
        console=console,
        flops_per_token=model.flops_per_token(stage_after(stages, start).length),
        peak=peak_flops(device) * parallel.world,
        memory=partial(peak_memory, device),
    )
    tracer = Tracer(t.profile, folder, parallel.rank, console)

    looks, ledger = due_looks(t.validation, settings.steps), make_ledger(settings, batches)
    if start == 0 and "step0" in (about := read_json(folder / MANIFEST)):
        recorder.write(0, "step0", **about["step0"])

    measured: dict[int, dict[int, float]] = {}  # held-out NLL by length, of each step

    def look(done: int) -> None:
        """Held-out loss at and beyond the trained length, and text, where they are due."""
        writes = done == settings.steps or (t.samples.every and done % t.samples.every == 0)
        with average.applied() if average and (done in looks or writes) else nullcontext():
            if done in looks:
                measured[done] = validate(monitor, model, parallel, autocast, recorder, done)
            if writes and parallel.takes_part:
                write_samples(model, prepared.tokenizer, t.samples, device, autocast, recorder, done, console)
        parallel.settle(model)
        parallel.wait()
        recorder.resume_clock()

    def save(done: int, last: bool) -> None:
        with as_one(parallel, "save"):
            recorder.sync()
            state = {"step": done, "tokens": settings.tokens_after(done), "gate": gate.state()}
            state |= {"groups": batches.groups_used(done)}
            state[HELD_OUT] = held_out_state(measured.get(done, {}))
        with as_one(parallel.listeners, "save"):
            if parallel.takes_part:
                saver.save(done, model, optimizer, state, average, wait=last)
        with as_one(parallel, "save"):
            if main_process:
                write_exposure(folder, with_parents(folder, ledger.upto(done)))
        recorder.resume_clock()

    # On a GPU, outcomes are read one step late, so that the host never waits inside a step.
    leave = 1 if device.type == "cuda" else 0
    saver = Saver(folder, t.checkpoint, settings.train_length, parallel.holders)
    used = groups_behind(folder, settings, state)
    supply = Supply(batches, used, parallel, interrupts, watch, recorder, console)
    done, saved, stop = start, start, 0
    with recorder, saver, tracer:
        parallel.wait()  # the main process may have taken long to reach its mirrors
        interrupts.begin_steps()
        model.train()
        recorder.resume_clock()
        for step, batch in supply.batches(start, settings.steps):
            tracer.before(step)
            stage = stage_of(stages, step)
            if stage.start == step > 0:
                model.reposition(stage.model)
                gate.begin_stage()
                recorder.change(stage, model.flops_per_token(stage.length))
            rates = learning_rates(t, stage, step, settings.steps)
            set_learning_rates(optimizer, rates)
            parts = micro_batches(batch, sequences_at_once(settings, stage.length), stage.length, device)
            done = step + 1
            about = {"tokens": settings.tokens_after(done), "targets": batch.n_targets}
            about |= {"passes": batch.passes} if batch.passes else {}
            is_due = done in looks or any(e and done % e == 0 for e in (t.samples.every, t.checkpoint.every))
            with watch.together(f"step {done}"):
                outcome = train_step(parts, batch.n_targets, leave=interrupts.status or saver.status)
                recorder.step(done, outcome, rates, **about, epoch=batch.epoch, data=batch.hash)
                stop = recorder.read(leave=0 if is_due else leave)
            if is_due:
                look(done)
            if stop or done == settings.steps or (t.checkpoint.every and done % t.checkpoint.every == 0):
                recorder.read()
                save(done, last=bool(stop) or done == settings.steps)
                saved = done
            if stop:
                break
        stop = stop or supply.status
        if stop and done < settings.steps:
            if saved < done:
                recorder.read()
                save(done, last=True)
            name = interrupts.received.name if interrupts.received else "a signal"
            where = f"after step {done}; saved" if done else "before the first step: nothing to save"
            console.say(f"stopped by {name} {where}. The same command goes on from here.")
            return stop
        if start < settings.steps:
            recorder.write(settings.steps, "end", peak_memory_bytes=peak_memory(device))
    say_done(folder, settings, batches, device, console)
    return 0


def make_monitor(prepared: Prepared, settings: RunSettings, console: Console) -> MonitorTargets:
    """Fixed targets of held-out text, at the multiples of the trained length that model and text allow."""
    v, limit = settings.training.validation, reach_of(settings)
    if not prepared.valid.n_documents:
        raise TrainingError(
            f"{prepared.valid.folder} holds no documents to measure the held-out loss on: "
            "set data.valid_fraction above 0, or give data.valid_source"
        )
    asked = [multiple * settings.train_length for multiple in v.multiples]
    lengths = [length for length in asked if limit is None or length <= limit]
    if lengths < asked:
        console.say(f"positions end at {limit}: held-out loss is measured at {lengths} only")
    if (best := settings.training.checkpoint.best) and best * settings.train_length not in lengths:
        raise TrainingError(
            f"training.checkpoint.best = {best} cannot be measured: positions end at {limit}; lower it"
        )
    monitor = monitor_targets(prepared.valid, lengths, v.targets, v.spans, settings.seed)
    if monitor.note:
        console.say(monitor.note)
    return monitor


def step0_score(prepared: Prepared, settings: RunSettings, device: torch.device) -> Score:
    """NLL of each of some fixed held-out targets at the trained length."""
    v, length = settings.training.validation, settings.train_length
    monitor = monitor_targets(prepared.valid, [length], v.targets, v.spans, settings.seed)
    return lambda model: monitor.nll(model, length, device)


if __name__ == "__main__":
    run_main(main)
