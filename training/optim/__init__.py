"""Optimizers, learning rates, gradient clipping, EMA of the weights, and the guard against bad
steps."""

from training.optim.optimizer import (
    clip_grad_norm,
    guarded_step,
    make_optimizer,
    set_learning_rates,
)

__all__ = ["clip_grad_norm", "guarded_step", "make_optimizer", "set_learning_rates"]
