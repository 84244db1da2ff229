"""The one error of this package."""


class EvaluationError(ValueError):
    """What the user asked for cannot be measured; the message names the thing and the mend."""
