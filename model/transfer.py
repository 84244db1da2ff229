"""Transfer of parameters between modules."""

from __future__ import annotations

from torch import nn

from model.errors import ModelError


def transfer_parameters(old: nn.Module, new: nn.Module) -> None:
    """Assign the Parameter objects of `old`, and its training mode, to `new`.

    Raises:
        ModelError: names or shapes of the parameters differ.
    """
    given = dict(old.named_parameters(remove_duplicate=False))
    shapes = {name: weight.shape for name, weight in given.items()}
    if shapes != {name: weight.shape for name, weight in new.named_parameters(remove_duplicate=False)}:
        raise ModelError(
            "these model.position settings change the parameters and cannot be overridden after training"
        )
    for name, weight in given.items():
        owner, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(owner), leaf, weight)
    new.train(old.training)
