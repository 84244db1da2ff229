"""Gradient clipping by global norm, for whole and sharded gradients."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_grad_norm(optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor:
    """Clip the gradients of all parameter groups to a global norm of `max_norm`.

    Args:
        max_norm: None leaves the gradients unchanged.

    Returns:
        () the norm before clipping; of sharded gradients, the norm over all shards.
    """
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    grads = [weight.grad for weight in parameters if weight.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):  # of sharded gradients, reduced or not
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm or float("inf"), norm)
    return norm
