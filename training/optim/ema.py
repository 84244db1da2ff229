"""Exponential moving average of the weights, for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from run_directory.optimizer_settings import EmaSettings
from run_directory.sharded_tensors import detached, own_part
from run_directory.stages import steps_of
from run_directory.weights import named_weights


class EMA:
    """mean ← decay · mean + (1 − decay) · weights after every update, on the weights' device, in
    float32 or float64. Up to step `start` the mean equals the weights. Each process averages its
    own shards.

    Args:
        steps: updates of the whole run.
    """

    def __init__(self, model: nn.Module, settings: EmaSettings, steps: int):
        self._weights = dict(named_weights(model))
        self._decay = settings.decay
        self._start = steps_of(settings.start, steps)
        self._step = 0
        self._means = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def update(self, held: Tensor) -> None:
        """Update the mean after one more step. Where `held` (a bool scalar on the device) is true,
        the step was skipped and the mean does not change."""
        self._step += 1
        if self._step <= self._start:
            self._follow()
            return
        means = self._own_means()
        share = (1 - self._decay) * (~held).to(means[0].dtype)
        difference = torch._foreach_sub(self._present(), means)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_mul_(difference, share)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(means, difference)  # pyright: ignore[reportPrivateImportUsage]

    def load(self, stored: dict[str, Tensor] | None, step: int) -> None:
        """Load a mean saved after `step` updates; None: start from the current weights."""
        self._step = step
        if stored is None:
            self._follow()
            return
        for name, mean in self._means.items():
            own_part(mean).copy_(own_part(stored[name]))

    def tensors(self, copied: bool = False) -> dict[str, Tensor]:
        """The means by parameter name, on the CPU or sharded; `copied` as in `detached`."""
        return {name: detached(mean, copied) for name, mean in self._means.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the means as the model's weights in the block."""
        with torch.no_grad():
            kept = [weight.clone() for weight in self._own_weights()]
            self._into_weights(self._own_means())
        try:
            yield
        finally:
            self._into_weights(kept)

    @torch.no_grad()
    def _into_weights(self, tensors: list[Tensor]) -> None:
        for weight, tensor in zip(self._own_weights(), tensors, strict=True):
            weight.copy_(tensor)

    @torch.no_grad()
    def _follow(self) -> None:
        torch._foreach_copy_(self._own_means(), self._present())  # pyright: ignore[reportPrivateImportUsage]

    def _present(self) -> list[Tensor]:
        """The weights in the means' dtype."""
        pairs = zip(self._own_weights(), self._means.values(), strict=True)
        return [weight.to(mean.dtype) for weight, mean in pairs]

    def _own_weights(self) -> list[Tensor]:
        """This process's shards of the weights, sharing their memory."""
        return [own_part(weight.detach()) for weight in self._weights.values()]

    def _own_means(self) -> list[Tensor]:
        return [own_part(mean) for mean in self._means.values()]
