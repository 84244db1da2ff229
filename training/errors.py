"""The user errors of this package: their message is one sentence for the person at the terminal."""


class TrainingError(ValueError):
    """Something in a run, a checkpoint or the user's request is wrong; the message names it and the mend."""


class ConfigError(TrainingError):
    """Settings that cannot be used; the message lists every problem found, one a line."""
