"""Parts of the training loop; `train.py` puts them together on one screen."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data import Batch
from model import Places
from training.average import Average
from training.exits import INTERRUPTED, REQUEUE
from training.gate import Gate, Verdict
from training.optimizer import gated_step
from training.parallel import Parallel


def places_of(batch: Batch, length: int) -> Places:
    """Where a batch's tokens stand, in the model's words; `length` is declared for every row."""
    return Places(
        order=batch.order,
        position=batch.position,
        document=batch.document,
        layout=batch.layout,
        reach=batch.reach,
        lengths=(length,),
        unit_steps=batch.unit_steps,
    )


@dataclass(frozen=True)
class MicroBatch:
    """A share of a step's sequences on the device: (b, T) tokens and targets, and where they stand."""

    tokens: Tensor
    targets: Tensor
    places: Places


def micro_batches(batch: Batch, size: int | None, length: int, device: torch.device) -> list[MicroBatch]:
    """The batch cut into groups of at most `size` sequences, moved to the device without waiting."""

    def move(x: Tensor, start: int, stop: int) -> Tensor:
        rows = x if x.shape[0] == 1 else x[start:stop]
        return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows

    count = batch.tokens.shape[0]
    places, parts = places_of(batch, length), []
    for start in range(0, count, size or count):
        stop = min(start + (size or count), count)
        part = Places(
            order=move(places.order, start, stop),
            position=move(places.position, start, stop),
            document=move(places.document, start, stop),
            layout=places.layout,
            reach=places.reach,
            lengths=places.lengths,
            unit_steps=places.unit_steps,
        )
        parts.append(MicroBatch(move(batch.tokens, start, stop), move(batch.targets, start, stop), part))
    return parts


class Reading(NamedTuple):
    """What one step did, on the host."""

    loss: float
    grad_norm: float
    status: int  # exit status asked for by a signal to any rank; 0 where none came
    reason: int  # why its update was not applied, 0 where it was: see gate.py
    count: int  # steps of the run skipped for that reason so far
    stopped: bool  # no update is applied any more


@dataclass(frozen=True)
class Outcome:
    """What one step did, on its way to the host: reading it waits for that step and not for the next."""

    values: Tensor  # (7,) float64: loss, gradient norm, ranks to leave, those to come back, verdict
    ready: torch.cuda.Event | None  # when `values` have arrived; None: at once

    @classmethod
    def of(
        cls, loss: Tensor, grad_norm: Tensor, leave: Tensor, requeue: Tensor, verdict: Verdict
    ) -> "Outcome":
        """From scalars on the device: the mean NLL over all targets and ranks, the norm before clipping, how
        many ranks were asked to leave and to come back, and what the gate decided."""
        values = torch.stack([x.double() for x in (loss, grad_norm, leave, requeue, *verdict)])
        if values.device.type != "cuda":
            return cls(values, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(host, ready)

    def read(self) -> Reading:
        """On the host."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, leave, requeue, *verdict = self.values.tolist()
        status = REQUEUE if requeue else INTERRUPTED if leave else 0
        return Reading(loss, norm, status, int(verdict[0]), int(verdict[1]), bool(verdict[2]))


class Stepper:
    """One optimizer step: forward and backward over micro-batches, clip, update.

    The loss is the sum of NLL over the step's targets divided by their global number, which every rank knows
    from the sampler. The gate decides on the device whether the update is applied, on every rank alike; the
    host reads what it decided when it next looks.
    """

    def __init__(
        self,
        parallel: Parallel,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None,
        autocast: torch.dtype | None,
        gate: Gate,
        z_loss: float | None = None,
        average: Average | None = None,
    ):
        self.parallel, self.model, self.optimizer = parallel, model, optimizer
        self.clip, self.autocast = clip or float("inf"), autocast
        self.z_loss, self.average = z_loss, average
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gate = gate

    def __call__(self, parts: list[MicroBatch], n_targets: int, leave: int = 0) -> Outcome:
        """Train on this rank's micro-batches of one step with `n_targets` targets over all ranks; `leave` is
        the exit status this rank was asked to leave with."""
        device, world = self.parallel.device, self.parallel.world
        total = torch.zeros((), dtype=torch.float64, device=device)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with nullcontext() if last else self.parallel.local(self.model):
                with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
                    nll = self.model(part.tokens, part.places, part.targets, z_loss=self.z_loss)
                # DDP averages gradients over ranks; times `world`, the average is the sum.
                (nll.sum() * (world / n_targets)).backward()
            total += nll.detach().sum()
        asked = (torch.full_like(total, float(yes)) for yes in (leave > 0, leave == REQUEUE))
        shared = self.parallel.sum(torch.stack([total, *asked]))
        loss = shared[0] / n_targets
        norm = self.parallel.clip(self._parameters, self.clip)
        verdict = self.gate(loss, norm)
        held = (verdict.reason > 0) | verdict.stopped
        gated_step(self.optimizer, held)
        if self.average is not None:
            self.average.update(held)
        self.optimizer.zero_grad(set_to_none=True)
        return Outcome.of(loss, norm, shared[1], shared[2], verdict)


class Meter:
    """Speed and time left, over the steps since the last look; time spent elsewhere left out.

    tokens_after: of a run's first so many steps, as steps may differ in size.
    """

    def __init__(self, tokens_after: Callable[[int], int], steps: int, done: int):
        self._tokens_after, self._whole, self._done = tokens_after, tokens_after(steps), done
        self._seen, self._seconds, self._flops, self._rates = done, 0.0, 0.0, (0.0, 0.0)
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Leave out what passed since the last step: a validation, a checkpoint."""
        self._last = time.perf_counter()

    def step(self, flops_per_token: float) -> None:
        """One more step, each of whose tokens took so many operations."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        self._done += 1
        tokens = self._tokens_after(self._done) - self._tokens_after(self._done - 1)
        self._flops += tokens * flops_per_token

    def look(self) -> tuple[float, float, float]:
        """(tokens and FLOP per second since the last look, seconds left at that rate)."""
        here = self._tokens_after(self._done)
        if self._done > self._seen:
            seconds = max(self._seconds, 1e-9)
            self._rates = (here - self._tokens_after(self._seen)) / seconds, self._flops / seconds
            self._seen, self._seconds, self._flops = self._done, 0.0, 0.0
        speed = self._rates[0]
        return *self._rates, (self._whole - here) / speed if speed else float("nan")
