"""Settings, console, run folders, checkpoints, logs, optimizer and schedule."""

from training.errors import ConfigError, TrainingError

__all__ = ["ConfigError", "TrainingError"]
