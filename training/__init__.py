"""Settings, console, run directories, checkpoints, logs, optimizer and schedule."""
