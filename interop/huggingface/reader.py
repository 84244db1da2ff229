"""Typed reading of the keys of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from errors import InteropError


class ConfigReader:
    """The keys of one JSON object.

    Args:
        values: the object.
        file: its file (and key), for messages.
        defaults: values of absent keys.
    """

    def __init__(
        self, values: Mapping[str, Any], file: str, defaults: Mapping[str, Any] | None = None
    ):
        self.values = values
        self.file = file
        self.defaults = defaults or {}

    def get(self, key: str) -> Any:
        """The value, its default if the key is absent, or None."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def number(self, key: str, kind: type, *default: Any) -> Any:
        """A number above 0; `default` if the key is null or absent.

        Raises:
            InteropError: not such a number, or missing without a default.
        """
        value = self.get(key)
        if value is None:
            if default:
                return default[0]
            raise InteropError(f"{self.file} has no '{key}', which its model requires")
        accepted = (int,) if kind is int else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, accepted)
            or not 0 < value < float("inf")
        ):
            what = "an integer above 0" if kind is int else "a number above 0"
            raise InteropError(f"{self.file}: {key} must be {what}, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, False, True):
            raise InteropError(f"{self.file}: {key} must be true or false, got {value!r}")
        return bool(value)

    def numbers(
        self,
        key: str,
        length: int | None = None,
    ) -> list[float] | None:
        """A list of numbers of at least 0, or None; with `length`, of at least that many."""
        value = self.get(key)
        if value is None:
            return None
        good = isinstance(value, list) and all(
            isinstance(number, (int, float))
            and not isinstance(number, bool)
            and 0 <= number < float("inf")
            for number in value
        )
        if not good:
            raise InteropError(
                f"{self.file}: {key} must be a list of numbers of at least 0, got {value!r}"
            )
        if length is not None and len(value) < length:
            raise InteropError(f"{self.file}: {key} must have {length} entries, got {len(value)}")
        return value


def as_json(value: Any) -> str:
    """A value as it is written in a config.json."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
