"""The one error a user of the model can cause."""


class ModelError(ValueError):
    """A model setting, length or test-time override that cannot work; the message names it and the mend."""
