"""The same weights under other modules."""

from __future__ import annotations

from torch import nn

from model.errors import ModelError


def hand_over(old: nn.Module, new: nn.Module) -> None:
    """Give `new` the parameters of `old`, the very objects, and its mode. Raises ModelError where names or
    shapes differ: then a setting that may change after training shapes what is learned.
    """
    given = dict(old.named_parameters(remove_duplicate=False))
    shapes = {name: weight.shape for name, weight in given.items()}
    if shapes != {name: weight.shape for name, weight in new.named_parameters(remove_duplicate=False)}:
        raise ModelError("these settings of model.position change what is learned, so not after training")
    for name, weight in given.items():
        owner, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(owner), leaf, weight)
    new.train(old.training)
