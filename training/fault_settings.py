"""Settings of what a run does about steps that went wrong."""

from typing import Annotated, Literal

from pydantic import Field

from training.settings_base import Settings
from training.settings_base import free as _free


class StopOnNonFinite(Settings):
    """The run stops before the update, with its last checkpoint as it was."""

    name: Literal["stop"] = "stop"

    @property
    def limit(self) -> int:
        """Steps that may be skipped."""
        return 0


class SkipNonFinite(Settings):
    """The step changes nothing and the run goes on; its data are not seen again."""

    name: Literal["skip"] = "skip"
    limit: int = _free(10, "skipped steps of a whole run; one more stops it", ge=1)


NonFiniteSettings = Annotated[StopOnNonFinite | SkipNonFinite, Field(discriminator="name")]


class SpikeSettings(Settings):
    """A step whose loss lies far above those before it changes nothing, and the run goes on."""

    sigmas: float = Field(
        default=6.0, gt=0, description="a loss that many standard deviations above the mean is a spike"
    )
    window: int = Field(
        default=100,
        ge=2,
        le=100_000,
        description="applied steps that mean and deviation are taken over; none is a spike before there are "
        "as many, counted anew from each stage of the run",
    )
    limit: int = _free(10, "skipped steps of a whole run; one more stops it", ge=1)
