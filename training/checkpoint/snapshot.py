"""Snapshot of a run in training: the content of a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.checkpoint.sharded import TensorShard, detached, part_of
from training.optim.ema import EMA
from training.optim.optimizer import clean_name, named_weights

_MACHINE_FLAGS = ("foreach", "fused", "capturable", "differentiable")  # chosen by each machine


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint at one step."""

    weights: dict[str, Tensor | TensorShard]
    # and random generator states; None: weights only
    optimizer: dict[str, Tensor | TensorShard] | None
    options: dict  # the optimizer's numbers and options by group
    average: dict[str, Tensor | TensorShard] | None = None  # the EMA of the weights


def capture(
    model: nn.Module, optimizer, average: EMA | None = None, copied: bool = False
) -> Snapshot:
    """Take a snapshot on the host; with `copied`, later updates do not change it."""

    def parts(tensors: dict[str, Tensor]) -> dict[str, Tensor | TensorShard]:
        return {
            name: part_of(tensor, copied) if isinstance(tensor, DTensor) else tensor
            for name, tensor in tensors.items()
        }

    # States of torch's generators, for dropout and sampling; the data order does not use them.
    generators = {"generator/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states = enumerate(torch.cuda.get_rng_state_all())
        generators |= {f"generator/cuda{i}": state for i, state in states}
    moments, options = (
        (None, {}) if optimizer is None else optimizer_state(model, optimizer, copied)
    )
    return Snapshot(
        parts(weights_of(model, copied)),
        None if moments is None else parts(moments | generators),
        options,
        None if average is None else parts(average.tensors(copied)),
    )


def weights_of(model: nn.Module, copied: bool = False) -> dict[str, Tensor]:
    """All weights and persistent buffers by clean name; tied ones once, under their first name. On the CPU;
    sharded ones on their device; `copied` as in `detached`."""
    found: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = (own.untyped_storage().data_ptr(), own.storage_offset(), own.shape, own.stride())
        if own.numel() and place in seen:
            continue
        seen.add(place)
        found[clean_name(name)] = detached(tensor, copied)
    return found


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, copied: bool = False
) -> tuple[dict[str, Tensor], dict]:
    """The optimizer's tensors as `key/parameter name`, `copied` as in `detached`, and its numbers and group
    options as JSON."""
    names = {id(weight): name for name, weight in named_weights(model)}
    tensors = {}
    numbers = {}
    for weight, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{names[id(weight)]}"] = detached(value, copied)
            else:
                numbers.setdefault(names[id(weight)], {})[key] = value
    groups = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params" and k not in _MACHINE_FLAGS}
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in options.items()}
        groups.append(
            {"weights": [names[id(weight)] for weight in group["params"]], "options": options}
        )
    return tensors, {"groups": groups, "numbers": numbers}
