"""Exponential moving average of the weights, for evaluation."""

# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from run_directory.optimizer_settings import EmaSettings, as_steps
from run_directory.weights import named_weights, own_part


class EMA:
    """mean ← decay · mean + (1 − decay) · weights after every update, on the weights' device. Up to
    step `start` the mean equals the weights. Each process averages its own shards.

    Args:
        steps: updates of the whole run.

    means: by parameter name.
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
        """Update the mean after update `step` (1, 2, ...). Where `skip` (a bool scalar on the
        device) is true, the step was skipped and the mean does not change."""
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
