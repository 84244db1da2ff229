"""One training step after its backward pass: reduced over the ranks, judged on the device, read
later on the host."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from errors import INTERRUPTED, REQUEUE
from run_directory.training_settings import NonFiniteSettings, SpikeSettings
from training.parallel import Parallel

# reasons to skip an update; 0: it is applied
NOT_FINITE = 1
SPIKE = 2
REASONS = {NOT_FINITE: "not finite", SPIKE: "spike"}


def reduce_step(parallel: Parallel, nll: Tensor, status: int) -> tuple[Tensor, Tensor]:
    """Sum over all ranks the NLL and, of the ranks' exit statuses, how many are not 0 and how many
    ask for a requeue, (2,)."""
    requests = [torch.full_like(nll, float(flag)) for flag in (status > 0, status == REQUEUE)]
    total = parallel.sum(torch.stack([nll, *requests]))
    return total[0], total[1:]


class StepDecision(NamedTuple):
    """The decision about one step; scalars on the device."""

    skip: Tensor  # whether the optimizer must not apply this step
    reason: Tensor  # 0, NOT_FINITE or SPIKE
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
        limits = [0, on_nonfinite.limit, on_spike.limit if on_spike else 0]
        self._limits = torch.tensor(limits, device=device)
        # by reason; the first stays 0
        self._skipped = torch.zeros(3, dtype=torch.int64, device=device)
        window = on_spike.window if on_spike else 0
        # a ring of the losses of applied steps, and their number since the stage began
        self._losses = torch.zeros(window, dtype=torch.float64, device=device)
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, loss: Tensor, norm: Tensor) -> StepDecision:
        """Decide about a step by its loss (mean over all ranks) and the global gradient norm."""
        broken = ~(loss.isfinite() & norm.isfinite())
        reason = broken * NOT_FINITE
        if self._on_spike is not None:
            limit = self._losses.mean() + self._on_spike.sigmas * self._losses.std(correction=0)
            is_known = self._applied >= self._on_spike.window
            reason = reason + ((loss.double() > limit) & is_known & ~broken) * SPIKE
        # Steps after a stop are consequences of it: they are not counted.
        reason = torch.where(self._stopped, 0, reason)
        here = torch.arange(3, device=loss.device) == reason
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
        """The state for a checkpoint, as JSON; {} where it is that of a new guard."""
        skipped = self._skipped.tolist()
        state: dict = {"skipped": {word: skipped[reason] for reason, word in REASONS.items()}}
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


class StepMetrics(NamedTuple):
    """The metrics of one step, on the host."""

    loss: float
    grad_norm: float  # before clipping
    status: int  # exit status requested by any rank; 0: none
    reason: int  # why the update was skipped: 0, NOT_FINITE or SPIKE
    count: int  # steps of the run skipped for that reason so far
    stopped: bool  # a limit of skipped steps is exceeded: no further update is applied


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, copied to the host asynchronously: reading waits for this step
    only."""

    # (7,) float64: loss, gradient norm, ranks that exit, ranks to requeue, reason, count, stopped
    values: Tensor
    ready: torch.cuda.Event | None  # recorded when `values` have arrived; None: they have

    @classmethod
    def of(
        cls, loss: Tensor, grad_norm: Tensor, requests: Tensor, decision: StepDecision
    ) -> "StepResult":
        """From tensors on the device.

        Args:
            loss: the mean NLL over all targets and ranks.
            grad_norm: the gradient norm before clipping.
            requests: the counts of `reduce_step`.
            decision: that of the StepGuard.
        """
        scalars = (loss, grad_norm, *requests, decision.reason, decision.count, decision.stopped)
        values = torch.stack([x.double() for x in scalars])
        if values.device.type != "cuda":
            return cls(values, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(host, ready)

    def read(self) -> StepMetrics:
        """Wait for the values."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, exits, requeue, reason, count, stopped = self.values.tolist()
        status = REQUEUE if requeue else INTERRUPTED if exits else 0
        return StepMetrics(
            loss=loss,
            grad_norm=norm,
            status=status,
            reason=int(reason),
            count=int(count),
            stopped=bool(stopped),
        )
