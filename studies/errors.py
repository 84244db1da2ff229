"""The user errors of this package: their message is for the person at the terminal."""


class StudyError(ValueError):
    """A study file, a study folder or its results are wrong; the message names the thing and the mend."""
