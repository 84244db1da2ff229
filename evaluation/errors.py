"""The one error of this package."""


class EvaluationError(ValueError):
    """An evaluation that cannot run; the message names the setting or file, and how to fix it."""
