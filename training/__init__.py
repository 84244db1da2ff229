"""Settings, console, run directories, checkpoints, logs, optimizer and schedule."""

from errors import ConfigError, TrainingError

__all__ = ["ConfigError", "TrainingError"]
