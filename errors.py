"""The user errors of all packages, and the exit statuses of train.py.

A user error is an error that the user can cause and fix. Commands print its message, which names
the setting or file and the fix, without a traceback. Every package may import this module.
"""

import errno
import os

# Exit statuses; 0 is a completed run.
FAILED = 2  # an error of this process or of another process of the run
INTERRUPTED = 130  # Ctrl-C; 128 + SIGINT, as shells report it
REQUEUE = 75  # SIGTERM or SIGUSR1: the same command resumes the run; EX_TEMPFAIL of sysexits.h
RANK_LOST = 76  # another process died or hangs: the same command resumes from the last checkpoint


class UserError(ValueError):
    """Base class of the errors below. A ValueError, so that pydantic reports it together with its
    own errors."""


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
    """A Hugging Face folder that cannot be converted, or only with different results."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Control characters, surrogates and bidirectional controls, which a terminal would interpret.
_UNPRINTABLE = {
    code: ascii(chr(code))[1:-1]
    for low, high in ((0, 0x1F), (0x7F, 0x9F), (0x202A, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))
    for code in range(low, high + 1)
    if chr(code) not in "\t\n"
}


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk; safetensors reports this only in the message."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(os.strerror(number) in str(error) for number in _FULL)


def printable(text: str) -> str:
    """Escape control characters, as Python does, in external text (file names, settings,
    prompts)."""
    return text.translate(_UNPRINTABLE)
