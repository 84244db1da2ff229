"""The outcome of one training step: reduced over the ranks on the device, read later on the
host."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from errors import INTERRUPTED, REQUEUE
from training.distributed.parallel import Parallel
from training.optim.step_guard import StepDecision


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

    # (7,) float64: loss, gradient norm, ranks that exit, ranks to requeue, StepDecision
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
        values = torch.stack([x.double() for x in (loss, grad_norm, *requests, *decision)])
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
            loss,
            norm,
            status,
            int(reason),
            int(count),
            bool(stopped),
        )


def reduce_step(
    parallel: Parallel,
    nll: Tensor,
    status: int,
) -> tuple[Tensor, Tensor]:
    """Sum over all ranks the NLL and, of the ranks' exit statuses, how many are not 0 and how many
    ask for a requeue, (2,)."""
    requests = (torch.full_like(nll, float(flag)) for flag in (status > 0, status == REQUEUE))
    total, *counts = parallel.sum(torch.stack([nll, *requests]))
    return total, torch.stack(counts)
