"""Train one model.

Run the same command again to resume from the newest checkpoint. Later YAML files override earlier
ones; command-line overrides come last.

  python train.py configs/tiny.yaml
  python train.py configs/small.yaml configs/position/alibi.yaml training.tokens=200M
  python train.py configs/tiny.yaml --data my_texts/
  accelerate launch --config_file configs/accelerate/one_node.yaml train.py configs/base.yaml

An extension run starts from the weights of a trained run or of a foreign model; a fork also
continues its optimizer, under other settings.

  python train.py configs/extension/yarn.yaml parent.run=runs/quickstart
  python train.py configs/extension/yarn.yaml parent.run=hf:HuggingFaceTB/SmolLM2-135M
  python train.py training.tokens=30M --fork runs/tiny-rope-012345678
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from errors import REQUEUE
from run_directory.training_schedule import TrainingSchedule
from run_directory.training_settings import TrainingSettings, steps_every
from settings.load import setting_before_validation
from settings.script import run_main
from training import checkpointer
from training.hardware import peak_memory
from training.metrics import Metrics, StepResult
from training.micro_batches import StepBatch, step_batches
from training.parallel import Parallel
from training.setup import TrainingRun
from training.stop_requests import StopRequests
from training.train_options import parse_options
from training.train_state import TrainState
from training.validation import Validation


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training of the command line and return the exit status."""
    status, _ = run_training(arguments)
    return status


def run_training(arguments: Sequence[str] | None = None) -> tuple[int, Path]:
    """Run the training of the command line and return the exit status and the run directory."""
    assert __doc__
    options = parse_options(__doc__, arguments)
    if setting_before_validation(options.overrides, "parent") is not None:
        from interop.imported_runs import with_imported_parent

        options.overrides = with_imported_parent(options.overrides)
    with StopRequests() as requests:
        run = TrainingRun(options, requests)
        if options.dry_run:
            from training.dry_run import dry_run

            return dry_run(run, train_step), run.folder
        from evaluation.monitor import monitor_targets

        with run.open(monitor_targets):
            return train(run), run.folder


def train(run: TrainingRun) -> int:
    """Train from the newest intact checkpoint to the last step. Returns the exit status."""
    parallel = run.parallel
    t = run.settings.training
    state = TrainState.create(run.model, run.settings, parallel)
    checkpointer.resume(run, state)
    run.announce(state.step)
    schedule = TrainingSchedule(run.settings)
    checkpoint_steps = steps_every(t.checkpoint.interval, run.steps)
    is_complete = state.step == run.steps

    with Metrics(run, state) as metrics:
        validation = Validation(run, metrics)
        if state.step == 0 and 0 in validation.steps:
            validation.run(state)
        run.begin_steps()
        for batch in step_batches(run.sampler, parallel, schedule, start=state.step):
            state.begin_step(batch)
            result = train_step(state, batch, parallel, t, run.requests)

            validates = state.step in validation.steps
            saves = state.step in checkpoint_steps
            status = metrics.log(state, result, batch, wait=validates or saves)
            if validates:
                validation.run(state)
            if saves or status:
                checkpointer.save(run, state, metrics)
            if status and state.step < run.steps:
                run.announce_stop(state.step)
                return status
        if not is_complete:
            metrics.write(run.steps, "end", peak_memory_bytes=peak_memory(run.device))
    run.announce_end(validation.prompts)
    return 0


def train_step(
    state: TrainState,
    batch: StepBatch,
    parallel: Parallel,
    t: TrainingSettings,
    requests: StopRequests,
) -> StepResult:
    """One update of the weights. Does not wait for the device."""
    nll = forward_backward(state, batch, parallel, t.z_loss)
    exits = (requests.status > 0, requests.status == REQUEUE)
    flags = [torch.full_like(nll, flag) for flag in exits]
    nll, n_exit, n_requeue = parallel.sum(torch.stack([nll, *flags]))
    loss = nll / batch.n_targets
    scale = state.loss_scale
    if scale is not None:
        scale.unscale(state.optimizer.weights)
    grad_norm = state.optimizer.clip_grad_norm(t.grad_clip)
    overflows = None if scale is None else scale.overflows(loss, grad_norm)
    decision = state.guard(loss, grad_norm, overflows)
    state.optimizer.step(decision.skip)
    state.model.zero_grad(set_to_none=not t.cuda_graphs)
    if state.carried is not None:
        state.carry(decision.skip)
    state.step += 1
    if state.ema:
        state.ema.update(state.step, decision.skip)
    scalars = {"loss": loss, "grad_norm": grad_norm, "exit": n_exit, "requeue": n_requeue}
    if scale is not None and overflows is not None:
        scalars["loss_scale"] = scale.scale
        scale.update(overflows)
    return StepResult(scalars | decision._asdict())


def forward_backward(
    state: TrainState, batch: StepBatch, parallel: Parallel, z_loss: float | None = None
) -> torch.Tensor:
    """Accumulate the gradient of the NLL per target over this rank's micro-batches of one step. The
    last micro-batch reduces the gradient over all ranks.

    Returns:
        The sum of this rank's NLL, () float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    last = batch.parts[-1]
    for part in batch.parts:
        with parallel.no_sync(state.forward, enabled=part is not last):
            with parallel.autocast():
                nll = state.forward(
                    part.tokens,
                    part.positions,
                    part.targets,
                    reduction="sum",
                    z_loss=z_loss,
                    shard=parallel.shard,
                    cache=None if state.carried is None else state.carried_state(part.rows),
                )
            # DDP averages gradients over ranks; times `world`, the average is the sum.
            scaled = nll if state.loss_scale is None else nll * state.loss_scale.scale
            (scaled * (parallel.world / batch.n_targets)).backward()
        total += nll.detach()
    return total


if __name__ == "__main__":
    run_main(main)
