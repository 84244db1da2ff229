"""Settings of when a run is saved, and what of it is kept."""

from training.settings_base import Settings
from training.settings_base import free as _free


class CheckpointSettings(Settings):
    """When the run is saved."""

    every: int | None = _free(500, "steps between checkpoints; null: only at the end and when stopped", ge=1)
    keep: int = _free(2, "newest checkpoints kept; two, so that a damaged one has a predecessor", ge=1)
    keep_every: int | None = _free(None, "kept for good: those of whole multiples of so many steps", ge=1)
    best: int | None = _free(
        None,
        "kept too: the one of lowest held-out loss at this multiple of train_length, one of "
        "validation.multiples",
        ge=1,
    )
    asynchronous: bool = _free(
        False,
        "written beside the steps from a copy on the host, one at a time; needs room for that copy",
    )
