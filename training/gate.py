"""Whether the update of a step is applied: decided on the device, on every rank alike."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from training.checkpoint import steps_of
from training.errors import TrainingError
from training.fault_settings import NonFiniteSettings, SpikeSettings

NOT_FINITE, SPIKE = 1, 2  # why an update was not applied; 0 where it was
REASONS = {NOT_FINITE: "not finite", SPIKE: "spike"}


class Verdict(NamedTuple):
    """What became of one step; scalars on the device."""

    reason: Tensor  # 0, NOT_FINITE or SPIKE
    count: Tensor  # steps of the run skipped for that reason so far, this one among them
    stopped: Tensor  # a limit is passed: no update is applied from here on


class Gate:
    """Holds back the update of a step whose loss or gradient norm is not finite, or whose loss is a spike.

    A spike is a loss above mean + sigmas · deviation (of the population, float64) of the last `window`
    applied steps. All of it rests on sums over all ranks, which every rank has bit for bit, so all decide
    alike. Nothing here waits for the device but `state`, which belongs beside a checkpoint.
    """

    def __init__(
        self, on_nonfinite: NonFiniteSettings, on_spike: SpikeSettings | None, device: torch.device | str
    ):
        self._on_spike = on_spike
        limits = [0, on_nonfinite.limit, on_spike.limit if on_spike else 0]
        self._limits = torch.tensor(limits, device=device)
        self._skipped = torch.zeros(3, dtype=torch.int64, device=device)  # by reason; the first stays 0
        window = on_spike.window if on_spike else 0
        self._losses = torch.zeros(window, dtype=torch.float64, device=device)  # a ring of applied steps
        self._applied = torch.zeros((), dtype=torch.int64, device=device)  # since the stage began
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, loss: Tensor, norm: Tensor) -> Verdict:
        """Judge a step by its loss, the mean over all ranks, and the norm of its whole gradient."""
        broken = ~(loss.isfinite() & norm.isfinite())
        spike = self._is_spike(loss) & ~broken
        reason = broken * NOT_FINITE + spike * SPIKE
        # What follows a stop is not judged any more: it is a consequence, or not even computed anew.
        reason = torch.where(self._stopped, 0, reason)
        here = torch.arange(3, device=loss.device) == reason
        self._skipped = self._skipped + (here & (reason > 0))
        self._stopped = self._stopped | (self._skipped > self._limits).any()
        self._remember(loss, (reason == 0) & ~self._stopped)
        return Verdict(reason, self._skipped.gather(0, reason[None])[0], self._stopped)

    def _is_spike(self, loss: Tensor) -> Tensor:
        if self._on_spike is None:
            return torch.zeros((), dtype=torch.bool, device=loss.device)
        mean, deviation = self._losses.mean(), self._losses.std(correction=0)
        is_above = loss.double() > mean + self._on_spike.sigmas * deviation
        return is_above & (self._applied >= self._on_spike.window)

    def _remember(self, loss: Tensor, applied: Tensor) -> None:
        if self._on_spike is not None:
            slots = torch.arange(len(self._losses), device=loss.device)
            here = (slots == self._applied % len(self._losses)) & applied
            self._losses = torch.where(here, loss.double(), self._losses)
            self._applied = self._applied + applied

    def begin_stage(self) -> None:
        """Forget the losses so far: what comes next is another loss."""
        self._losses.zero_()
        self._applied.zero_()

    def state(self) -> dict:
        """What a resumed run needs to judge as this one would: JSON; {} where there is nothing to tell."""
        skipped = self._skipped.tolist()
        if self._on_spike is None and not any(skipped):
            return {}
        seen = {"losses": self._losses.tolist(), "applied": int(self._applied)} if self._on_spike else {}
        return {"skipped": {word: skipped[reason] for reason, word in REASONS.items()}} | seen

    def load(self, state: dict) -> None:
        """Take up a saved state; losses of another window are left behind."""
        for reason, word in REASONS.items():
            self._skipped[reason] = state.get("skipped", {}).get(word, 0)
        losses = state.get("losses", [])
        if self._on_spike is not None and len(losses) == len(self._losses):
            self._losses.copy_(torch.tensor(losses, dtype=torch.float64))
            self._applied.fill_(state["applied"])


def refuse_stopped(step: int, loss: float, norm: float, reason: int, count: int, folder: str | Path) -> None:
    """Raise for the step that ended the run."""
    found = f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}"
    steps = steps_of(Path(folder))
    kept = (
        f"the checkpoint of step {steps[-1]} in {folder} is good" if steps else "there is no checkpoint yet"
    )
    if reason == SPIKE:
        raise TrainingError(
            f"{found}, spike number {count} of the run and more than training.on_spike.limit; it changed no "
            f"weight and {kept}. Raise the limit, or lower "
            "training.optimizer.lr in a new run, or look at the data of this step"
        )
    more = f", number {count} of the run and more than training.on_nonfinite.limit" if count > 1 else ""
    raise TrainingError(
        f"{found}{more}; it changed no weight and {kept}. Lower "
        "training.optimizer.lr or training.clip in a new run, look at the data of this step, or go on "
        f"without it: {'raise that limit' if count > 1 else 'training.on_nonfinite.name=skip'}"
    )
