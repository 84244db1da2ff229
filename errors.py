"""The user errors of all packages, the exit statuses of train.py, and the base class of settings.

A user error is one that the user can cause and fix: commands print its message, which names the setting or
file and the fix, without a traceback. Every package may import this module.
"""

from pydantic import BaseModel, ConfigDict

# Exit statuses; 0 is a completed run.
FAILED = 2  # an error of this process or of another one of the run
INTERRUPTED = 130  # Ctrl-C; 128 + SIGINT, as shells report it
REQUEUE = 75  # SIGTERM or SIGUSR1: the same command resumes the run; EX_TEMPFAIL of sysexits.h
RANK_LOST = 76  # another process died or hangs: the same command resumes from the last checkpoint


class UserError(ValueError):
    """Base class of the errors below. A ValueError, so that pydantic reports it with its other problems."""


class ModelError(UserError):
    """Invalid model setting, length or test-time override."""


class DataError(UserError):
    """Invalid text, shards, tokenizer or data settings."""


class TrainingError(UserError):
    """Invalid run, checkpoint, option or request."""


class ConfigError(TrainingError):
    """Invalid settings; the message lists every problem, one per line."""


class EvaluationError(UserError):
    """An evaluation that cannot run."""


class StudyError(UserError):
    """Invalid study file, study folder or results of a study."""


class InteropError(UserError):
    """A Hugging Face folder that cannot be converted, or not without a different result."""


class StrictSettings(BaseModel):
    """Base class of settings: immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
