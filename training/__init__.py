"""Settings, console, run directories, checkpoints, logs, optimizer and schedule."""

from training.errors import ConfigError, TrainingError

__all__ = ["ConfigError", "TrainingError"]
