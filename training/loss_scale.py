"""Loss scaling for float16, whose smallest numbers exceed many gradients (arXiv:1710.03740)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

START = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale doubles


class LossScale:
    """The factor on the loss of a backward pass: halved after a step whose gradients overflow, and
    doubled after GROWTH_INTERVAL steps without one, as by `torch.amp.GradScaler`.

    GradScaler decides on each rank from that rank's gradients, and waits for the device. This class
    reads the norm over all ranks, and only `state` synchronizes.
    """

    def __init__(self, device: torch.device | str):
        self.scale = torch.full((), START, device=device)
        # steps since the scale changed
        self._finite = torch.zeros((), dtype=torch.int64, device=device)

    def unscale(self, weights: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale; exact, because it is a power of two."""
        grads = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_mul_(grads, self.scale.reciprocal())

    def overflows(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether the gradients of a step overflow while its loss is finite. At a scale of 1,
        gradients are not finite for another reason."""
        return loss.isfinite() & ~norm.isfinite() & (self.scale > 1)

    def update(self, overflows: Tensor) -> None:
        """Set the scale of the next step."""
        finite = torch.where(overflows, 0, self._finite + 1)
        grows = finite == GROWTH_INTERVAL
        factor = torch.where(overflows, 0.5, torch.where(grows, 2.0, 1.0))
        self.scale = self.scale * factor
        self._finite = torch.where(grows, 0, finite)

    def state(self) -> dict[str, float]:
        """The state for a checkpoint, as JSON."""
        return {"scale": float(self.scale), "finite": int(self._finite)}

    def load(self, state: dict[str, float]) -> None:
        """Load a saved state; {} if the run had no scale yet."""
        self.scale.fill_(state.get("scale", START))
        self._finite.fill_(int(state.get("finite", 0)))
