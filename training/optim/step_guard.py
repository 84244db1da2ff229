"""Skips updates of non-finite steps and loss spikes; decides on the device, equally on every
rank."""

from typing import NamedTuple

import torch
from torch import Tensor

from run_directory.training_settings import NonFiniteSettings, SpikeSettings

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


class StepGuard:
    """Skips the update of a step whose loss or gradient norm is not finite, or whose loss is a
    spike.

    A spike is a loss above mean + sigmas · (population) standard deviation of the last `window`
    applied steps, in float64. The inputs are sums over all ranks, equal bit for bit, so all ranks
    decide equally. Only `state`, which is saved in checkpoints, synchronizes with the device.
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
        self._applied = torch.zeros(
            (),
            dtype=torch.int64,
            device=device,
        )  # since the stage began
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
        return StepDecision(
            reason,
            self._skipped.gather(0, reason[None])[0],
            self._stopped,
        )

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
