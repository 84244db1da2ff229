"""The error class of the model package, and the base class of its settings, which reject unknown keys."""

from pydantic import BaseModel, ConfigDict


class ModelError(ValueError):
    """Invalid model setting, length or test-time override; the message names it and how to fix it."""


class StrictSettings(BaseModel):
    """Base class of settings: immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
