"""Loss, gradient norm and speed of training steps."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from errors import INTERRUPTED, REQUEUE
from training.distributed.parallel import Parallel
from training.optim.step_guard import StepDecision, StepMetrics


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, copied to the host asynchronously: reading waits for this step only."""

    # (7,) float64: loss, gradient norm, ranks that exit, ranks to requeue, StepDecision
    values: Tensor
    ready: torch.cuda.Event | None  # recorded when `values` have arrived; None: they have

    @classmethod
    def of(
        cls, loss: Tensor, grad_norm: Tensor, requests: Tensor, decision: StepDecision
    ) -> "StepResult":
        """From tensors on the device: the mean NLL over all targets and ranks, the gradient norm before
        clipping, the counts of `reduce_step`, and the decision of the StepGuard."""
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
        loss, norm, exits, requeue, *decision = self.values.tolist()
        status = REQUEUE if requeue else INTERRUPTED if exits else 0
        return StepMetrics(
            loss, norm, status, int(decision[0]), int(decision[1]), bool(decision[2])
        )


def reduce_step(parallel: Parallel, nll: Tensor, status: int) -> tuple[Tensor, Tensor]:
    """Sum over all ranks: the NLL, and of the ranks' exit statuses how many are not 0 and how many ask for a
    requeue, (2,)."""
    requests = (torch.full_like(nll, float(flag)) for flag in (status > 0, status == REQUEUE))
    total, *counts = parallel.sum(torch.stack([nll, *requests]))
    return total, torch.stack(counts)


class ThroughputMeter:
    """Speed since the last `measure`, without the time of validation and checkpoints."""

    def __init__(self):
        self._seconds = self._tokens = self._flops = 0.0
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last step."""
        self._last = time.perf_counter()

    def step(self, tokens: int, flops_per_token: float) -> None:
        """Count one more step."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        self._tokens += tokens
        self._flops += tokens * flops_per_token

    def measure(self) -> tuple[float, float]:
        """(tokens per second, FLOP/s) since the last call."""
        seconds = max(self._seconds, 1e-9)
        rates = self._tokens / seconds, self._flops / seconds
        self._seconds = self._tokens = self._flops = 0.0
        return rates
