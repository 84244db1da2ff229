"""Several optimizers over different parameters as one optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers; has their parameter groups in order, and one state.

    The groups and the state are the same objects as those of the parts, so loading here loads into
    them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every part, after one call of `closure` if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss
