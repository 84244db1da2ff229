"""Several optimizers over different weights, as one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Together(torch.optim.Optimizer):
    """Optimizers that step together: their groups in order, and one state.

    What is done to groups and state here, loading among it, is done to theirs: they are the same objects.
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
        """One update of every part, after one call of `closure` where it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss
