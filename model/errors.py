"""The error class of the model package."""


class ModelError(ValueError):
    """Invalid model setting, length or test-time override; the message names it and how to fix it."""
