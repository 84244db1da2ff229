"""Whether the update of a step is applied or skipped."""

from typing import NamedTuple

import torch
from torch import Tensor

from run_directory.training_settings import NonFiniteSettings, SpikeSettings

# reasons to skip an update; 0: it is applied
NOT_FINITE = 1
SPIKE = 2
OVERFLOW = 3  # overflow of scaled gradients, which has no limit
REASONS = {NOT_FINITE: "not finite", SPIKE: "spike", OVERFLOW: "overflow"}
NO_LIMIT = 2**62


class StepDecision(NamedTuple):
    """The decision about one step; scalars on the device."""

    skip: Tensor  # whether the optimizer must not apply this step
    reason: Tensor  # 0, NOT_FINITE, SPIKE or OVERFLOW
    count: Tensor  # steps of the run skipped for that reason so far, including this one
    stopped: Tensor  # a limit is exceeded: no further update is applied


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
        limits = [0, on_nonfinite.limit, on_spike.limit if on_spike else 0, NO_LIMIT]
        self._limits = torch.tensor(limits, device=device)
        # number of skipped steps by reason; the first entry stays 0
        self._skipped = torch.zeros(len(limits), dtype=torch.int64, device=device)
        window = on_spike.window if on_spike else 0
        # a ring of the losses of applied steps, and their number since the stage began
        self._losses = torch.zeros(window, dtype=torch.float64, device=device)
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, loss: Tensor, norm: Tensor, overflows: Tensor | None = None) -> StepDecision:
        """Decide about a step by its loss (mean over all ranks) and the global gradient norm.
        `overflows`: whether the norm is not finite only because the loss was scaled."""
        broken = ~(loss.isfinite() & norm.isfinite())
        reason = broken * NOT_FINITE
        if overflows is not None:
            reason = torch.where(overflows, OVERFLOW, reason)
        if self._on_spike is not None:
            limit = self._losses.mean() + self._on_spike.sigmas * self._losses.std(correction=0)
            is_known = self._applied >= self._on_spike.window
            reason = reason + ((loss.double() > limit) & is_known & ~broken) * SPIKE
        # Steps after a stop are consequences of it: they are not counted.
        reason = torch.where(self._stopped, 0, reason)
        here = torch.arange(len(self._skipped), device=loss.device) == reason
        self._skipped = self._skipped + (here & (reason > 0))
        self._stopped = self._stopped | (self._skipped > self._limits).any()
        skip = (reason > 0) | self._stopped
        if self._on_spike is not None:
            slots = torch.arange(len(self._losses), device=loss.device)
            slot = (slots == self._applied % len(self._losses)) & ~skip
            self._losses = torch.where(slot, loss.double(), self._losses)
            self._applied = self._applied + ~skip
        return StepDecision(skip, reason, self._skipped.gather(0, reason[None])[0], self._stopped)

    def begin_stage(self) -> None:
        """Discard the losses so far: losses of another stage are not comparable."""
        self._losses.zero_()
        self._applied.zero_()

    def state(self) -> dict:
        """The state for a checkpoint, as JSON; {} if the guard is like a new one."""
        skipped = self._skipped.tolist()
        seen = {r: word for r, word in REASONS.items() if r != OVERFLOW or skipped[r]}
        state: dict = {"skipped": {word: skipped[reason] for reason, word in seen.items()}}
        if self._on_spike is not None:
            return state | {"losses": self._losses.tolist(), "applied": int(self._applied)}
        return state if any(skipped) else {}

    def load(self, state: dict) -> None:
        """Load a saved state; losses of another window size are dropped."""
        for reason, word in REASONS.items():
            self._skipped[reason] = state.get("skipped", {}).get(word, 0)
        losses = state.get("losses", [])
        if self._on_spike is not None and len(losses) == len(self._losses):
            self._losses.copy_(torch.tensor(losses, dtype=torch.float64))
            self._applied.fill_(state["applied"])
