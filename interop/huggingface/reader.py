"""Typed reading of the keys of a config.json."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from errors import InteropError

LARGEST = 1e30  # largest number that is read; sizes, bases and factors of models are smaller


@dataclass(frozen=True)
class Stored:
    """The counts of tensors in a checkpoint and of numbers in them, which limit every size."""

    tensors: int
    numbers: int


UNLIMITED = Stored(10**6, 10**12)


class ConfigReader:
    """The keys of one JSON object.

    Args:
        values: the JSON object.
        file: file (and key) of the object, for messages.
        stored: limits of sizes.
        defaults: values of absent keys.
        computed: functions that compute values of keys that are null, or absent without a default.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        stored: Stored = UNLIMITED,
        defaults: Mapping[str, Any] | None = None,
        computed: Mapping[str, Callable[[ConfigReader], Any]] | None = None,
    ):
        self.values = values
        self.file = file
        self.stored = stored
        self.defaults = defaults or {}
        self.computed = computed or {}

    def get(self, key: str) -> Any:
        """The value of a key, its default if the key is absent, or None."""
        value = self.values[key] if key in self.values else self.defaults.get(key)
        if value is None and key in self.computed:
            return self.computed[key](self)
        return value

    def size(self, key: str, *default: Any) -> Any:
        """A number of layers, heads or features; `default` if the key is null or absent.

        Raises:
            InteropError: the value is not such a number, or too large for the weights.
        """
        value = self.number(key, int, *default)
        if value is not None:
            self.check_size(key, value)
        return value

    def check_size(self, key: str, value: float) -> None:
        limit, what = self.stored.numbers, "values"
        if key in ("num_hidden_layers", "layers"):
            limit, what = self.stored.tensors, "tensors"
        if value > limit:
            raise InteropError(
                f"{self.file}: {key} = {shown(value)} does not fit the weights, which have "
                f"{limit:,} {what}"
            )

    def number(self, key: str, kind: type, *default: Any) -> Any:
        """A number above 0; `default` if the key is null or absent.

        Raises:
            InteropError: the value is not such a number, or is missing without a default.
        """
        value = self.get(key)
        if value is None:
            if default:
                return default[0]
            raise InteropError(f"{self.file} has no '{key}', which its model requires")
        if not is_number(value, kind) or value == 0:
            what = "an integer" if kind is int else "a number"
            raise InteropError(
                f"{self.file}: {key} must be {what} above 0 and at most {LARGEST:g}, got "
                f"{shown(value)}"
            )
        return kind(value)

    def count(self, key: str) -> int:
        """An integer of at least 0."""
        value = self.get(key)
        if not is_number(value, int):
            raise InteropError(f"{self.file}: {key} must be an integer, got {shown(value)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, False, True):
            raise InteropError(f"{self.file}: {key} must be true or false, got {shown(value)}")
        return bool(value)

    def object(self, key: str) -> dict[str, Any]:
        """A JSON object; {} if the key is null or absent."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InteropError(f"{self.file}: {key} must be an object, got {shown(value)}")
        return value

    def within(self, *keys: str) -> ConfigReader:
        """The reader of an object nested in this one."""
        reader = self
        for key in keys:
            reader = ConfigReader(reader.object(key), f"{reader.file}: {key}", self.stored)
        return reader

    def replaced(self, **values: Any) -> ConfigReader:
        """A reader of these keys with other values."""
        return ConfigReader({**self.values, **values}, self.file, self.stored)

    def numbers(self, key: str, length: int | None = None) -> list[float] | None:
        """A list of numbers of at least 0, or None; with `length`, a list of at least `length`
        numbers."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(is_number(number, float) for number in value):
            raise InteropError(
                f"{self.file}: {key} must be a list of numbers of at least 0, got {shown(value)}"
            )
        if length is not None and len(value) < length:
            raise InteropError(f"{self.file}: {key} must have {length} entries, got {len(value)}")
        return value


def is_number(value: Any, kind: type) -> bool:
    """Whether a value is an integer, or with `kind` float a number, from 0 to LARGEST."""
    accepted = (int,) if kind is int else (int, float)
    is_typed = isinstance(value, accepted) and not isinstance(value, bool)
    return is_typed and 0 <= value <= LARGEST


def shown(value: Any) -> str:
    """A value of a config.json for messages, on one line and shortened."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else reprlib.repr(value)
