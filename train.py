"""Train one model.

Run the same command again to resume from the newest checkpoint. Later YAML files override earlier ones;
command-line overrides come last.

  python train.py configs/tiny.yaml
  python train.py configs/small.yaml configs/position/alibi.yaml configs/data/folder.yaml training.tokens=200M
  python train.py configs/extension/yarn.yaml parent.run=runs/quickstart      extension run of a trained run
  python train.py configs/extension/yarn.yaml parent.run=hf:HuggingFaceTB/SmolLM2-135M    of a foreign model
  python train.py training.tokens=30M --fork runs/tiny-012345678     continue a copy under other settings
  accelerate launch --config_file configs/accelerate/one_node.yaml train.py configs/base.yaml
"""

from collections.abc import Callable, Sequence

import torch

from evaluation.monitor import monitor_targets
from interop.runs import with_imported_parent
from settings.script import run_main
from training.checkpoint.checkpointer import Checkpointer
from training.distributed.parallel import Parallel
from training.interrupts import Interrupts
from training.logging.metrics_logger import MetricsLogger
from training.logging.profiler import Profiler
from training.logging.step_metrics import StepResult, reduce_step
from training.logging.summary import announce, announce_end
from training.micro_batches import MicroBatch, micro_batches
from training.optim import clip_grad_norm, guarded_step, make_optimizer, set_learning_rates
from training.optim.ema import EMA
from training.optim.step_guard import StepGuard
from training.options import parse_options
from training.prefetcher import Prefetcher
from training.run.setup import TrainingRun, dry_run, open_run
from training.stages import TrainingSchedule
from training.validation import Validator


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    assert __doc__
    options = parse_options(__doc__, arguments)
    options.overrides = with_imported_parent(options.overrides)
    with Interrupts() as interrupts:
        if options.dry_run:
            return dry_run(options, train_step)
        with open_run(options, interrupts, monitor_targets) as run:
            return train(run)


def train(run: TrainingRun) -> int:
    """Train from the newest good checkpoint to the last step; returns the exit status."""
    settings = run.settings
    parallel = run.parallel
    device = run.device
    t = settings.training
    steps = settings.steps
    model = parallel.wrap(run.model, compiled=t.compile, autocast=run.autocast)
    optimizer = make_optimizer(run.model, t.optimizer)
    ema = EMA(run.model, t.ema, steps) if t.ema else None
    guard = StepGuard(t.on_nonfinite, t.on_spike, device)
    checkpointer = Checkpointer(run, optimizer, ema, guard)
    done = start = checkpointer.resume()
    schedule = TrainingSchedule(settings)
    announce(run, start)
    logger = MetricsLogger(run, start)
    validator = Validator(run, ema, logger)
    profiler = Profiler(t.profile, run.folder, parallel.rank, run.console)
    prefetcher = Prefetcher(run, logger, checkpointer.groups)
    # On a GPU, results are read one step late, so that the host never waits inside a step.
    pending = 1 if device.type == "cuda" else 0
    stop = 0

    with logger, checkpointer, profiler:
        run.begin_steps()
        logger.resume_clock()
        for step, batch in prefetcher.batches(start, steps):
            profiler.before(step)
            stage = schedule.stage(step)
            if stage.start == step > 0:
                run.model.reposition(stage.model)
                guard.begin_stage()
                logger.change(stage)
            rates = schedule.learning_rates(step)
            set_learning_rates(optimizer, rates)
            done = step + 1
            is_due = validator.is_due(done) or checkpointer.is_due(done)

            with run.watchdog.collective(f"step {done}"):
                size = schedule.micro_batch_size(step)
                parts = micro_batches(batch, size, stage.length, device, parallel.shard)
                result = train_step(
                    *(model, parallel, optimizer, guard, parts, batch.n_targets),
                    grad_clip=t.grad_clip,
                    z_loss=t.z_loss,
                    autocast=run.autocast,
                    ema=ema,
                    status=lambda: run.interrupts.status or checkpointer.status or logger.status,
                )
                logger.step(done, result, rates, batch)
                stop = logger.read(pending=0 if is_due else pending)

            if validator.is_due(done):
                validator.run_step(done)
            if checkpointer.is_due(done):
                checkpointer.save(
                    done, logger, validator.nll.get(done, {}), wait=stop > 0 or done == steps
                )
            if stop:
                break

        stop = stop or prefetcher.status
        if checkpointer.saved < done:
            checkpointer.save(done, logger, validator.nll.get(done, {}), wait=True)
        if stop and done < steps:
            run.report_stop(done)
            return stop
        if start < steps:
            logger.end(steps)
    announce_end(run, validator.prompts)
    return 0


def train_step(
    model: torch.nn.Module,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    guard: StepGuard,
    parts: list[MicroBatch],
    n_targets: int,
    *,
    grad_clip: float | None = None,
    z_loss: float | None = None,
    autocast: torch.dtype | None = None,
    ema: EMA | None = None,
    status: Callable[[], int] = lambda: 0,
) -> StepResult:
    """One update of the weights. Does not wait for the device.

    Args:
        status: exit status requested by this process, 0 for none; called after the backward pass.
    """
    nll = forward_backward(model, parallel, parts, n_targets, autocast, z_loss)
    nll, requests = reduce_step(parallel, nll, status())
    loss = nll / n_targets
    grad_norm = clip_grad_norm(optimizer, grad_clip)
    decision = guard(loss, grad_norm)
    guarded_step(optimizer, decision.skip)
    if ema:
        ema.update(decision.skip)
    optimizer.zero_grad(set_to_none=True)
    return StepResult.of(loss, grad_norm, requests, decision)


def forward_backward(
    model: torch.nn.Module,
    parallel: Parallel,
    parts: list[MicroBatch],
    n_targets: int,
    autocast: torch.dtype | None = None,
    z_loss: float | None = None,
) -> torch.Tensor:
    """Accumulate the gradient of the NLL per target over this rank's micro-batches of one step; the last one
    reduces it over all ranks.

    Args:
        n_targets: targets of the step on all ranks.

    Returns:
        The sum of this rank's NLL, () float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    for i, part in enumerate(parts):
        with parallel.no_sync(model, enabled=i < len(parts) - 1):
            with torch.autocast(parallel.device.type, autocast, enabled=autocast is not None):
                how = {"reduction": "sum", "z_loss": z_loss, "shard": part.shard}
                nll = model(part.tokens, part.positions, part.targets, **how)
            # DDP averages gradients over ranks; times `world`, the average is the sum.
            (nll * (parallel.world / n_targets)).backward()
        total += nll.detach()
    return total


if __name__ == "__main__":
    run_main(main)
