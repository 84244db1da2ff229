"""The one error of this package that a user can cause and mend."""


class InteropError(ValueError):
    """A foreign folder that cannot become a run, or could only become a wrong one; names the file and key."""
