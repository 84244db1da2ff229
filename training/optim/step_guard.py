"""Skips updates of non-finite steps and loss spikes; decides on the device, equally on every rank."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from errors import TrainingError
from run_directory.training_settings import NonFiniteSettings, SpikeSettings
from training.checkpoint.retention import newest_before_divergence
from training.checkpoint.storage import steps_of

# reasons to skip an update; 0: it is applied
NOT_FINITE = 1
SPIKE = 2
REASONS = {NOT_FINITE: "not finite", SPIKE: "spike"}


class StepDecision(NamedTuple):
    """The decision about one step; scalars on the device."""

    reason: Tensor  # 0, NOT_FINITE or SPIKE
    count: Tensor  # steps of the run skipped for that reason so far, including this one
    stopped: Tensor  # a limit is exceeded: no further update is applied

    @property
    def skip(self) -> Tensor:
        """Whether the optimizer must not apply this step."""
        return (self.reason > 0) | self.stopped


class StepMetrics(NamedTuple):
    """The metrics of one step, on the host."""

    loss: float
    grad_norm: float  # before clipping
    status: int  # exit status requested by any rank; 0: none
    reason: int  # why the update was skipped: 0, NOT_FINITE or SPIKE
    count: int  # steps of the run skipped for that reason so far
    stopped: bool  # a limit of skipped steps is exceeded: no further update is applied


class StepGuard:
    """Skips the update of a step whose loss or gradient norm is not finite, or whose loss is a spike.

    A spike is a loss above mean + sigmas · (population) standard deviation of the last `window` applied
    steps, in float64. The inputs are sums over all ranks, equal bit for bit, so all ranks decide equally.
    Only `state`, which is saved in checkpoints, synchronizes with the device.
    """

    def __init__(
        self,
        on_nonfinite: NonFiniteSettings,
        on_spike: SpikeSettings | None,
        device: torch.device | str,
    ):
        self._on_spike = on_spike
        limits = [0, on_nonfinite.limit, on_spike.limit if on_spike else 0]
        self._limits = torch.tensor(limits, device=device)
        # by reason; the first stays 0
        self._skipped = torch.zeros(3, dtype=torch.int64, device=device)
        window = on_spike.window if on_spike else 0
        # a ring of applied steps
        self._losses = torch.zeros(window, dtype=torch.float64, device=device)
        self._applied = torch.zeros((), dtype=torch.int64, device=device)  # since the stage began
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, loss: Tensor, norm: Tensor) -> StepDecision:
        """Decide about a step by its loss (mean over all ranks) and the global gradient norm."""
        broken = ~(loss.isfinite() & norm.isfinite())
        spike = self._is_spike(loss) & ~broken
        reason = broken * NOT_FINITE + spike * SPIKE
        # Steps after a stop are consequences of it: they are not counted.
        reason = torch.where(self._stopped, 0, reason)
        here = torch.arange(3, device=loss.device) == reason
        self._skipped = self._skipped + (here & (reason > 0))
        self._stopped = self._stopped | (self._skipped > self._limits).any()
        self._remember(loss, (reason == 0) & ~self._stopped)
        return StepDecision(reason, self._skipped.gather(0, reason[None])[0], self._stopped)

    def _is_spike(self, loss: Tensor) -> Tensor:
        if self._on_spike is None:
            return torch.zeros((), dtype=torch.bool, device=loss.device)
        mean = self._losses.mean()
        deviation = self._losses.std(correction=0)
        is_above = loss.double() > mean + self._on_spike.sigmas * deviation
        return is_above & (self._applied >= self._on_spike.window)

    def _remember(self, loss: Tensor, applied: Tensor) -> None:
        if self._on_spike is not None:
            slots = torch.arange(len(self._losses), device=loss.device)
            here = (slots == self._applied % len(self._losses)) & applied
            self._losses = torch.where(here, loss.double(), self._losses)
            self._applied = self._applied + applied

    def begin_stage(self) -> None:
        """Discard the losses so far: losses of another stage are not comparable."""
        self._losses.zero_()
        self._applied.zero_()

    def state(self) -> dict:
        """The state for a checkpoint, as JSON; {} where it is that of a new guard."""
        skipped = self._skipped.tolist()
        if self._on_spike is None and not any(skipped):
            return {}
        seen = (
            {"losses": self._losses.tolist(), "applied": int(self._applied)}
            if self._on_spike
            else {}
        )
        return {"skipped": {word: skipped[reason] for reason, word in REASONS.items()}} | seen

    def load(self, state: dict) -> None:
        """Load a saved state; losses of another window size are dropped."""
        for reason, word in REASONS.items():
            self._skipped[reason] = state.get("skipped", {}).get(word, 0)
        losses = state.get("losses", [])
        if self._on_spike is not None and len(losses) == len(self._losses):
            self._losses.copy_(torch.tensor(losses, dtype=torch.float64))
            self._applied.fill_(state["applied"])


def raise_stopped(step: int, found: StepMetrics, folder: Path, applied: int) -> None:
    """Raise TrainingError for the step that stopped the run; `applied` is the last applied step."""
    loss = found.loss
    reason = found.reason
    count = found.count
    steps = steps_of(folder)
    is_source = bool(steps) and reason != SPIKE and steps[-1] >= applied  # no update in between
    good = newest_before_divergence(folder, before=applied if is_source else None)
    if not steps:
        saved = "there is no checkpoint yet"
    elif good == steps[-1]:
        saved = f"the checkpoint of step {good} in {folder} is good"
    else:
        bad = (
            "has the weights that caused it"
            if is_source
            else "was saved after training had diverged"
        )
        rest = "there is no good one" if good is None else f"that of step {good} is good"
        saved = f"the checkpoint of step {steps[-1]} in {folder} {bad}; {rest}"
    limit = "training.on_spike.limit" if reason == SPIKE else "training.on_nonfinite.limit"
    is_over = reason == SPIKE or count > 1
    number = f" ({REASONS[reason]} number {count} of the run, above {limit})" if is_over else ""
    fixes = [
        "lower training.optimizer.lr or training.grad_clip in a new run",
        "check the data of this step",
    ]
    if not is_source or math.isfinite(loss):  # else every later step has such a loss
        fixes.append(f"raise {limit}" if is_over else "set training.on_nonfinite.name=skip")
    raise TrainingError(
        f"step {step}: the loss is {loss:g}, the gradient norm {found.grad_norm:g}{number}. The step was not "
        f"applied, and {saved}: {', or '.join(fixes)}"
    )
