"""The state of a run in training: what a checkpoint saves and restores."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from model import Transformer
from model.carried_state import CarriedState, can_continue
from run_directory.checkpoints import AVERAGE, Checkpoint, Tensors
from run_directory.process_group import ALONE, ProcessGroup
from run_directory.run_settings import RunSettings
from run_directory.training_settings import EmaSettings, as_steps
from run_directory.weights import (
    load_weights,
    named_weights,
    own_part,
    read_into,
    read_like,
    weights_of,
)
from training.loss_scale import LossScale
from training.micro_batches import StepBatch
from training.optimizer import Optimizer
from training.parallel import Parallel
from training.step_guard import StepGuard

# prefixes of keys among the tensors of the optimizer: states of torch's generators, and tensors
# that sequences carry
GENERATOR = "generator/"
CARRIED = "carried/"


class EMA:
    """mean ← decay · mean + (1 − decay) · weights after every update, on the weights' device. Up to
    step `start` the mean equals the weights. Each process averages its own shards.

    Args:
        steps: number of updates of the whole run.

    `means` has the averages by parameter name.
    """

    def __init__(self, model: nn.Module, settings: EmaSettings, steps: int):
        weights = named_weights(model)
        self.means = {name: weight.detach().clone() for name, weight in weights.items()}
        # sharing the memory of weights and means
        self._own_weights = [own_part(weight.detach()) for weight in weights.values()]
        self._own_means = [own_part(mean) for mean in self.means.values()]
        self._decay = settings.decay
        self._start = as_steps(settings.start, steps)

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update the mean after update `step` (1, 2, ...). If `skip` (a bool scalar on the device)
        is true, the step was skipped and the mean does not change."""
        if step <= self._start:
            self.follow()
            return
        means = self._own_means
        share = (1 - self._decay) * (~skip).to(means[0].dtype)
        difference = torch._foreach_sub(self._own_weights, means)
        torch._foreach_mul_(difference, share)
        torch._foreach_add_(means, difference)

    @torch.no_grad()
    def follow(self) -> None:
        """Set the mean to the weights."""
        torch._foreach_copy_(self._own_means, self._own_weights)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the means as the model's weights in the block."""
        with torch.no_grad():
            kept = [weight.clone() for weight in self._own_weights]
            torch._foreach_copy_(self._own_weights, self._own_means)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._own_weights, kept)


@dataclass
class TrainState:
    """Weights, optimizer, EMA, step guard and step of a run; the states of torch's generators, for
    dropout and sampling, are global and saved with them.

    Attributes:
        step: number of updates of the weights so far.
        forward: the model for training passes (DDP, compiled); shares the weights of `model`.
        loss_scale: the loss scale for float16; None: losses are not scaled.
        carried: tensors that this process's sequences carry from step to step, by name, with one
            row per sequence; see `CarriedState`. None: every window starts without a state.
    """

    model: Transformer
    optimizer: Optimizer
    guard: StepGuard
    ema: EMA | None
    forward: nn.Module
    loss_scale: LossScale | None = None
    step: int = 0
    carried: dict[str, Tensor] | None = None
    _passes: list[CarriedState] = field(default_factory=list)

    @classmethod
    def create(cls, model: Transformer, settings: RunSettings, parallel: Parallel) -> "TrainState":
        """The state before the first step."""
        t = settings.training
        model.casts_residual = t.residual_dtype == "autocast"
        # Wrap before creating the optimizer: wrapping may shard weights.
        forward = parallel.wrap(model, compiled=t.compile, cuda_graphs=t.cuda_graphs)
        if t.cuda_graphs:
            # Later backward passes add to these. A gradient that a recorded pass returns is in
            # memory that the next pass overwrites.
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
        return cls(
            model=model,
            optimizer=Optimizer(model, t.optimizer),
            guard=StepGuard(t.on_nonfinite, t.on_spike, parallel.device),
            ema=EMA(model, t.ema, settings.steps) if t.ema else None,
            forward=forward,
            loss_scale=LossScale(parallel.device) if t.precision == "float16" else None,
            carried={} if t.state == "carry" else None,
        )

    def carried_state(self, rows: slice) -> CarriedState:
        """The states that some of this process's sequences bring from the previous step."""
        assert self.carried is not None
        before = {name: x[rows] for name, x in self.carried.items()}
        self._passes.append(CarriedState(self.model.settings, before))
        return self._passes[-1]

    def carry(self, skip: Tensor) -> None:
        """Carry the states after the passes of a step; numbers of a skipped step that are not
        finite become 0."""
        assert self.carried is not None
        passes = [state.after() for state in self._passes]
        self._passes.clear()
        for name in passes[0]:
            x = torch.cat([each[name] for each in passes])
            self.carried[name] = torch.where(skip, x.nan_to_num(0.0, 0.0, 0.0), x)

    def begin_step(self, batch: StepBatch) -> None:
        """Set the learning rates of the next update and, if a stage begins with it, the positional
        scheme. Keys and states of another scheme are not carried on."""
        if batch.stage.start == self.step > 0:
            if self.carried and not can_continue(self.model.settings, batch.stage.model):
                self.carried.clear()
            self.model.reposition(batch.stage.model)
            self.guard.begin_stage()
        self.optimizer.set_learning_rates(batch.rates)

    def carried_rows(self, parallel: ProcessGroup) -> dict[str, Tensor]:
        """The tensors that the sequences of all processes carry, on the host. Every process must
        call it."""
        if self.carried is None:
            return {}
        parts = parallel.gather({name: x.cpu() for name, x in self.carried.items()})
        return {f"{CARRIED}{name}": torch.cat([part[name] for part in parts]) for name in parts[0]}

    def capture(self, carried: Mapping[str, Tensor] | None = None) -> Tensors:
        """The tensors of a checkpoint, which share the memory of this state. `carried` is the
        result of `carried_rows`."""
        optimizer = self.optimizer.saved_tensors() | dict(carried or {})
        optimizer[f"{GENERATOR}cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            for i, generator in enumerate(torch.cuda.get_rng_state_all()):
                optimizer[f"{GENERATOR}cuda{i}"] = generator
        tensors = {"model": weights_of(self.model), "optimizer": optimizer}
        if self.ema is not None:
            tensors["average"] = self.ema.means
        return tensors

    def restore(self, checkpoint: Checkpoint, parallel: ProcessGroup = ALONE) -> None:
        """Load everything that `capture` saves. An EMA that the checkpoint lacks starts from the
        weights. Raises TrainingError if the checkpoint has only weights."""
        checkpoint.check_resumable()
        load_weights(self.model, checkpoint.folder)
        stored = read_like(checkpoint.folder, "optimizer", named_weights(self.model))
        gpus = torch.cuda.device_count()
        for key in [key for key in stored if key.startswith((GENERATOR, CARRIED))]:
            tensor = stored.pop(key)
            name = key.partition("/")[2]
            if key.startswith(CARRIED):
                if self.carried is not None:
                    own = tensor.chunk(parallel.world)[parallel.rank]
                    self.carried[name] = own.to(self.model.embed.weight.device)
            elif name == "cpu":
                torch.set_rng_state(tensor)
            elif (gpu := int(name.removeprefix("cuda"))) < gpus:
                torch.cuda.set_rng_state(tensor, gpu)
        self.optimizer.load(stored)
        if self.ema is not None and checkpoint.has(AVERAGE):
            read_into(checkpoint.folder, "average", self.ema.means)
        elif self.ema is not None:
            self.ema.follow()
        self.guard.load(checkpoint.state.get("step_guard", {}))
        if self.loss_scale is not None:
            self.loss_scale.load(checkpoint.state.get("loss_scale", {}))
        self.step = checkpoint.step
