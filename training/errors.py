"""User errors of training and the exit statuses of train.py."""

# Exit statuses; 0 is a completed run.
FAILED = 2  # an error of this process or of another one of the run
INTERRUPTED = 130  # Ctrl-C; 128 + SIGINT, as shells report it
REQUEUE = 75  # SIGTERM or SIGUSR1: the same command resumes the run; EX_TEMPFAIL of sysexits.h
RANK_LOST = 76  # another process died or hangs: the same command resumes from the last checkpoint


class TrainingError(ValueError):
    """A run, a checkpoint or a request is invalid; the message names it and the fix."""


class ConfigError(TrainingError):
    """Invalid settings; the message lists every problem, one per line."""
