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

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
    )
    removed: ClassVar[dict[str, RemovedSetting]] = {}  # by dotted name

    @classmethod
    def from_earlier_versions(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree of stored settings in the spelling of this version."""
        return tree

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
    if isinstance(value, str) and accepts.numeric and str not in accepts.types:
        return _read_number(value)
    if isinstance(value, float) and accepts.numeric is int and value.is_integer():
        return int(value)
    if isinstance(value, (list, tuple)) and accepts.sequence and accepts.item:
        item = accepts.item
        return accepts.sequence(_read(member, item) for member in value)
    if isinstance(value, dict) and accepts.value:
        inner = accepts.value
        return {key: _read(member, inner) for key, member in value.items()}
    return value


def _read_number(text: str) -> Any:
    """The number that a text such as 200M stands for; other text as it is."""
    match = _SUFFIXED.fullmatch(text)
    if match is None:
        return text
    number = Decimal(match[1].replace("_", "")) * 10 ** _POWERS[match[2]]
    return int(number) if number == int(number) else float(number)


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field with its description."""
    return Field(default=default, description=description, **limits)


def free(default: Any, description: str, **limits: Any) -> Any:
    """A field that may change on resume."""
    return setting(
        default,
        description,
        json_schema_extra={"may_change": True},
        **limits,
    )


def optional(description: str, default: Any = None, **limits: Any) -> Any:
    """A field that counts in the identity of a run only where it differs from its default."""
    return setting(
        default,
        description,
        json_schema_extra={"counts_if_changed": True},
        **limits,
    )
