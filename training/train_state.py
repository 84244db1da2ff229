"""The state of a run in training: what a checkpoint saves and restores."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from errors import TrainingError
from model import ModelSettings, Transformer
from model.carried_state import CarriedState
from run_directory.checkpoints import AVERAGE, OPTIMIZER, Checkpoint, Snapshot
from run_directory.process_group import ALONE, ProcessGroup
from run_directory.run_settings import RunSettings
from run_directory.sharded_tensors import TensorShard, detached, part_of, read_like, shapes_in
from run_directory.weights import load_weights, named_weights, weights_of
from training.distributed.parallel import Parallel
from training.optim.ema import EMA
from training.optim.optimizer import make_optimizer
from training.optim.step_guard import StepGuard

CARRIED = "carried"  # key of what sequences carry, among the tensors of the optimizer
_MACHINE_FLAGS = ("foreach", "fused", "capturable", "differentiable")  # chosen by each machine


@dataclass
class TrainState:
    """Weights, optimizer, EMA, step guard and step of a run; the states of torch's generators, for
    dropout and sampling, are global and saved with them.

    Attributes:
        step: updates of the weights so far.
        forward: the model for training passes (DDP, compiled); shares its weights.
        carried: what this process's sequences carry from step to step, by name, one row each; see
            `CarriedState`. None: every window starts without a state.
    """

    model: Transformer
    optimizer: torch.optim.Optimizer
    guard: StepGuard
    ema: EMA | None
    forward: nn.Module
    step: int = 0
    carried: dict[str, Tensor] | None = None
    _passes: list[CarriedState] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        model: Transformer,
        settings: RunSettings,
        parallel: Parallel,
    ) -> "TrainState":
        """The state before the first step."""
        t = settings.training
        forward = parallel.wrap(
            model, compiled=t.compile
        )  # before the optimizer: it may shard weights
        return cls(
            model=model,
            optimizer=make_optimizer(model, t.optimizer),
            guard=StepGuard(t.on_nonfinite, t.on_spike, parallel.device),
            ema=EMA(model, t.ema, settings.steps) if t.ema else None,
            forward=forward,
            carried={} if t.state == "carry" else None,
        )

    def carried_state(self, rows: slice) -> CarriedState | None:
        """What some of this process's sequences carry to their pass; None: nothing is carried."""
        if self.carried is None:
            return None
        before = {name: x[rows] for name, x in self.carried.items()}
        self._passes.append(CarriedState(self.model.settings, before))
        return self._passes[-1]

    def carry(self, skip: Tensor) -> None:
        """Carry the states after the passes of a step; numbers of a skipped step that are not
        finite become 0."""
        passes = [state.after() for state in self._passes]
        self._passes.clear()
        for name in passes[0] if passes else ():
            x = torch.cat([each[name] for each in passes])
            self.carried[name] = torch.where(skip, x.nan_to_num(0.0, 0.0, 0.0), x)

    def begin_stage(self, model: ModelSettings) -> None:
        """Change the positional scheme; earlier losses are not comparable with those of the
        stage."""
        self.model.reposition(model)
        self.guard.begin_stage()

    def carried_rows(self, parallel: ProcessGroup) -> dict[str, Tensor]:
        """What the sequences of all processes carry, on the host. Every process must call it."""
        if self.carried is None:
            return {}
        parts = parallel.gather({name: x.cpu() for name, x in self.carried.items()})
        return {f"{CARRIED}/{name}": torch.cat([p[name] for p in parts]) for name in parts[0]}

    def capture(
        self, copied: bool = False, carried: Mapping[str, Tensor] | None = None
    ) -> Snapshot:
        """The content of a checkpoint, on the host; with `copied`, later updates do not change
        it. `carried` is that of `carried_rows`."""
        generators = {"generator/cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            for i, state in enumerate(torch.cuda.get_rng_state_all()):
                generators[f"generator/cuda{i}"] = state
        moments, options = self._optimizer_state(copied)
        tensors = {
            "model": _own_parts(weights_of(self.model, copied), copied),
            "optimizer": _own_parts(moments | generators | dict(carried or {}), copied),
        }
        if self.ema is not None:
            tensors["average"] = _own_parts(self.ema.tensors(copied), copied)
        state = {"step": self.step, "step_guard": self.guard.state()}
        return Snapshot(self.step, tensors, state, options)

    def _optimizer_state(self, copied: bool) -> tuple[dict[str, Tensor], dict]:
        """The optimizer's tensors as `key/parameter name`, and its numbers and group options as
        JSON."""
        names = {id(weight): name for name, weight in named_weights(self.model)}
        tensors = {}
        numbers = {}
        for weight, entries in self.optimizer.state.items():
            name = names[id(weight)]
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = detached(value, copied)
                else:
                    numbers.setdefault(name, {})[key] = value
        groups = []
        for group in self.optimizer.param_groups:
            options = {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params" and key not in _MACHINE_FLAGS
            }
            weights = [names[id(weight)] for weight in group["params"]]
            groups.append({"weights": weights, "options": options})
        return tensors, {"groups": groups, "numbers": numbers}

    def restore(self, checkpoint: Checkpoint, parallel: ProcessGroup = ALONE) -> None:
        """Load everything that `capture` saves. An EMA that the checkpoint lacks starts from the
        weights.

        Options of the parameter groups are those of the settings, which a fork may change; the
        learning rate is the saved one. Raises TrainingError where the checkpoint has no optimizer,
        or other groups.
        """
        saved = checkpoint.optimizer
        load_weights(self.model, checkpoint)
        self._restore_optimizer(checkpoint, saved, parallel)
        if self.ema is not None:
            means = None
            if checkpoint.has_average:
                own = self.ema.tensors()
                means = read_like(checkpoint.folder, own, own, (AVERAGE,))
            self.ema.load(means, checkpoint.step)
        self.guard.load(checkpoint.state.get("step_guard", {}))
        self.step = checkpoint.step

    def _restore_optimizer(
        self, checkpoint: Checkpoint, saved: dict, parallel: ProcessGroup
    ) -> None:
        weights = {name: weight.detach() for name, weight in named_weights(self.model)}
        names = {id(weight): name for name, weight in named_weights(self.model)}
        groups = self.optimizer.param_groups
        own = [[names[id(weight)] for weight in group["params"]] for group in groups]
        if own != [group["weights"] for group in saved["groups"]]:
            raise TrainingError(
                f"{checkpoint.folder}: its optimizer groups differ from those of the settings"
            )
        keys = shapes_in(checkpoint.folder, (OPTIMIZER,))
        like = {key: weights[name] for key in keys if (name := key.partition("/")[2]) in weights}
        stored = read_like(checkpoint.folder, keys, like, (OPTIMIZER,))
        state: dict[str, dict] = {name: dict(numbers) for name, numbers in saved["numbers"].items()}
        for key, tensor in stored.items():
            kind, _, name = key.partition("/")
            if kind == CARRIED and self.carried is not None:
                rows = tensor.chunk(parallel.world)[parallel.rank]
                self.carried[name] = rows.to(self.model.embed.weight.device)
            if kind not in ("generator", CARRIED):
                state.setdefault(name, {})[kind] = tensor
        order = [name for group in own for name in group]
        numbers = {name: i for i, name in enumerate(order)}
        param_groups = []
        for group, old, members in zip(
            groups,
            saved["groups"],
            own,
            strict=True,
        ):
            kept = {
                key: value
                for key, value in old["options"].items()
                if key not in group or key == "lr"
            }
            param_groups.append(group | kept | {"params": [numbers[name] for name in members]})
        by_number = {i: state[name] for name, i in numbers.items() if name in state}
        self.optimizer.load_state_dict({"state": by_number, "param_groups": param_groups})
        torch.set_rng_state(stored["generator/cpu"])
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if f"generator/cuda{i}" in stored:
                torch.cuda.set_rng_state(stored[f"generator/cuda{i}"], i)


def _own_parts(tensors: dict[str, Tensor], copied: bool) -> dict[str, Tensor | TensorShard]:
    """This process's shards of sharded tensors, and the others as they are."""
    return {
        name: part_of(tensor, copied) if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }
