"""Load a checkpoint into a model, an optimizer and the random generators."""

import torch
from torch import nn

from errors import TrainingError
from training.checkpoint.sharded import own_part, read_into, read_like, shapes_in
from training.checkpoint.snapshot import weights_of
from training.checkpoint.storage import AVERAGE, OPTIMIZER, WEIGHTS, Checkpoint
from training.optim.ema import EMA
from training.optim.optimizer import clean_name, named_weights


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
    with torch.no_grad():
        read_into(checkpoint.folder, {name: own[name] for name in stored}, (WEIGHTS,))


def load_average(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's EMA into a model's weights."""
    weights = dict(named_weights(model))
    stored = read_like(checkpoint.folder, weights, weights, (AVERAGE,))
    with torch.no_grad():
        for name, weight in weights.items():
            own_part(weight).copy_(own_part(stored[name]))


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    average: EMA | None = None,
) -> dict:
    """Restore weights, optimizer, EMA and random generators; returns the state of the training loop. Without
    an EMA in the checkpoint, it starts from the weights.

    Options of the parameter groups are those of the settings, which a fork may change; the learning rate is
    the saved one. Raises TrainingError where the checkpoint has no optimizer, or other groups.
    """
    saved = checkpoint.optimizer
    load_weights(model, checkpoint)
    names = {id(weight): name for name, weight in named_weights(model)}
    weights = {name: weight.detach() for name, weight in named_weights(model)}
    places = shapes_in(checkpoint.folder, (OPTIMIZER,))
    like = {
        place: weights[name] for place in places if (name := place.partition("/")[2]) in weights
    }
    stored = read_like(checkpoint.folder, places, like, (OPTIMIZER,))
    own = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
    if own != [group["weights"] for group in saved["groups"]]:
        raise TrainingError(
            f"{checkpoint.folder}: its optimizer groups differ from those of the settings"
        )
    state: dict[str, dict] = {name: dict(numbers) for name, numbers in saved["numbers"].items()}
    for place, tensor in stored.items():
        key, _, name = place.partition("/")
        if key != "generator":
            state.setdefault(name, {})[key] = tensor
    flat = [name for group in own for name in group]
    groups = []
    numbers = iter(range(len(flat)))
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        kept = {
            key: value for key, value in old["options"].items() if key not in group or key == "lr"
        }
        groups.append(group | kept | {"params": [next(numbers) for _ in group["params"]]})
    optimizer.load_state_dict(
        {
            "state": {i: state[name] for i, name in enumerate(flat) if name in state},
            "param_groups": groups,
        }
    )
    torch.set_rng_state(stored["generator/cpu"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"generator/cuda{i}" in stored:
            torch.cuda.set_rng_state(stored[f"generator/cuda{i}"], i)
    if average is not None:
        like = average.tensors()
        means = None
        if checkpoint.has_average:
            means = read_like(checkpoint.folder, like, like, (AVERAGE,))
        average.load(means, checkpoint.step)
    return checkpoint.state
