"""What every class of settings is made from."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def free(default: Any, description: str, **limits: Any) -> Any:
    """A field that may change on resume."""
    return Field(default=default, description=description, json_schema_extra={"may_change": True}, **limits)


class Settings(BaseModel):
    """Frozen after reading; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
