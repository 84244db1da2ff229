"""The base class of settings, and helpers that declare their fields."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from settings.accepted import Accepted, accepted

_SUFFIXED = re.compile(r"([-+]?[0-9][0-9_]*(?:\.[0-9]+)?|[-+]?\.[0-9]+)\s?([kKMBGT])")
_POWERS = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}


@dataclass(frozen=True)
class RemovedSetting:
    """A setting of earlier versions, which saved settings files still contain.

    Attributes:
        default: its default then, which is ignored without a note.
        reason: why other values are ignored or refused, as a sentence.
        changes_numbers: other values are refused, because they changed what a run computed.
    """

    default: Any
    reason: str
    changes_numbers: bool = False


class StrictSettings(BaseModel):
    """Base class of settings: immutable; unknown keys and values of another type are errors.

    Numbers may be written as 200M, whole numbers as 2e6, tuples as lists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    removed: ClassVar[dict[str, RemovedSetting]] = {}  # by dotted name

    @model_validator(mode="before")
    @classmethod
    def _read_values(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            key: _read(value, accepted(cls, key)) if key in fields else value
            for key, value in values.items()
        }


def _read(value: Any, accepts: Accepted) -> Any:
    """A value with its numbers and sequences in the types that the field accepts."""
    is_numeric = str not in accepts.types and (int in accepts.types or float in accepts.types)
    if isinstance(value, str) and is_numeric:
        if match := _SUFFIXED.fullmatch(value):
            number = Decimal(match[1].replace("_", "")) * 10 ** _POWERS[match[2]]
            value = int(number) if number == int(number) else float(number)
    elif isinstance(value, float) and int in accepts.types and float not in accepts.types:
        value = int(value) if value.is_integer() else value
    elif isinstance(value, (list, tuple)) and accepts.sequence and accepts.item:
        value = accepts.sequence(_read(item, accepts.item) for item in value)
    elif isinstance(value, dict) and accepts.value:
        value = {key: _read(item, accepts.value) for key, item in value.items()}
    return value


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field with its description."""
    return Field(default=default, description=description, **limits)


def free(default: Any, description: str, **limits: Any) -> Any:
    """A field that may change on resume."""
    return setting(default, description, json_schema_extra={"may_change": True}, **limits)


def optional(description: str, default: Any = None, **limits: Any) -> Any:
    """A field that counts in the identity of a run only where it differs from its default."""
    return setting(default, description, json_schema_extra={"counts_if_changed": True}, **limits)
