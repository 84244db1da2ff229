"""The base class of settings, and helpers that declare their fields."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class StrictSettings(BaseModel):
    """Base class of settings: immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field with its description."""
    return Field(default=default, description=description, **limits)


def free(default: Any, description: str, **limits: Any) -> Any:
    """A field that may change on resume."""
    return setting(default, description, json_schema_extra={"may_change": True}, **limits)


def optional(description: str, default: Any = None, **limits: Any) -> Any:
    """A field that counts in the identity of a run only where it differs from its default."""
    return setting(default, description, json_schema_extra={"counts_if_changed": True}, **limits)
