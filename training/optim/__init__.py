"""Optimizers, learning rates, gradient clipping, EMA of the weights, and the guard against bad
steps."""
