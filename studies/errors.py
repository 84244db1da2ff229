"""The user errors of this package; commands print their message without a traceback."""


class StudyError(ValueError):
    """A study file, a study folder or its results are invalid; the message names the problem and its fix."""
