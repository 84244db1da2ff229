"""The weights of a model by name: what a checkpoint stores, and how it is read back."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from errors import TrainingError
from run_directory.checkpoints import AVERAGE, WEIGHTS, Checkpoint, Snapshot, save_snapshot
from run_directory.sharded_tensors import detached, own_part, read_into, read_like, shapes_in


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of DDP (`module.`) and torch.compile
    (`_orig_mod.`)."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Clean names and parameters in the model's order; tied ones once."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter


def weights_of(model: nn.Module, copied: bool = False) -> dict[str, Tensor]:
    """All weights and persistent buffers by clean name; tied ones once, under their first name.

    They are on the CPU, sharded ones on their device; `copied` as in `detached`.
    """
    weights: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        own = own_part(tensor)
        memory = (own.untyped_storage().data_ptr(), own.storage_offset(), own.shape, own.stride())
        if own.numel() and memory in seen:
            continue
        seen.add(memory)
        weights[clean_name(name)] = detached(tensor, copied)
    return weights


@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into a model of the same shapes.

    Raises TrainingError naming weights that are missing, unknown or of another shape.
    """
    own = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    stored = shapes_in(checkpoint.folder, (WEIGHTS,))
    wrong = [f"{name} is missing" for name in weights_of(model) if name not in stored]
    for name, (shape, dtype) in stored.items():
        if name not in own:
            wrong.append(f"{name} is unknown to the model")
        elif shape != own[name].shape:
            wrong.append(f"{name} has shape {tuple(shape)}, the model's {tuple(own[name].shape)}")
        elif dtype.is_floating_point != own[name].is_floating_point():
            wrong.append(f"{name} is stored as {dtype}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise TrainingError(
            f"{checkpoint.folder} does not fit the settings: {'; '.join(wrong[:3])}{more}"
        )
    read_into(
        checkpoint.folder,
        {name: own[name] for name in stored},
        (WEIGHTS,),
    )


@torch.no_grad()
def load_average(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's EMA into a model's weights."""
    weights = dict(named_weights(model))
    stored = read_like(checkpoint.folder, weights, weights, (AVERAGE,))
    for name, weight in weights.items():
        own_part(weight).copy_(own_part(stored[name]))


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have equal weights, bit for bit."""
    ours = weights_of(a)
    theirs = weights_of(b)
    return ours.keys() == theirs.keys() and all(
        torch.equal(weight, theirs[name]) for name, weight in ours.items()
    )


def save_weights(
    folder: Path, step: int, model: nn.Module, state: dict | None = None
) -> Checkpoint:
    """Save a checkpoint of a run with weights only, for generation and evaluation.

    Args:
        state: what the checkpoint records, any JSON object.
    """
    return save_snapshot(folder, Snapshot(step, {"model": weights_of(model)}, state or {}))
