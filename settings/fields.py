"""The base class of settings, helpers that declare their fields, and what fields accept."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

TYPE_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
LIMIT_NAMES = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
_SUFFIXED = re.compile(r"([-+]?[0-9][0-9_]*(?:\.[0-9]+)?|[-+]?\.[0-9]+)\s?([kKMBGT])")
_POWERS = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}


@dataclass(frozen=True)
class RemovedSetting:
    """A setting of earlier versions, which saved settings files may still contain.

    Attributes:
        default: its former default, which is ignored without a note.
        reason: why other values are ignored, as a sentence.
    """

    default: Any
    reason: str


class StrictSettings(BaseModel):
    """Base class of settings: immutable; unknown keys and values of another type are errors.

    Numbers may be written as 200M, whole numbers as 2e6, tuples as lists. A field `name` is the tag
    of a choice; other classes must not have one, because files are merged by it.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
    )
    removed: ClassVar[dict[str, RemovedSetting]] = {}  # removed settings by dotted name

    @model_validator(mode="before")
    @classmethod
    def _read_values(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            key: _read(value, accepted(cls, key)) if key in cls.model_fields else value
            for key, value in values.items()
        }


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field with its description."""
    return Field(default=default, description=description, **limits)


def may_change(default: Any, description: str, **limits: Any) -> Any:
    """A field that may change on resume."""
    return setting(default, description, json_schema_extra={"may_change": True}, **limits)


def counts_if_changed(description: str, default: Any = None, **limits: Any) -> Any:
    """A field that counts in the identity of a run only if it differs from its default."""
    return setting(default, description, json_schema_extra={"counts_if_changed": True}, **limits)


@dataclass
class Accepted:
    """The values that an annotation accepts, with unions and annotations resolved.

    Attributes:
        types: plain types: int, float, str, bool.
        choices: settings classes of which one is chosen by its `name`.
        group: the settings class, if there is only one.
        container: list, tuple or dict (a mapping with free keys); `inner`: what its items or values
            accept.
        limits: limits of the values, such as `at least 1`.
    """

    types: list[type] = field(default_factory=list)
    literals: list[Any] = field(default_factory=list)
    null: bool = False
    choices: dict[str, type[BaseModel]] = field(default_factory=dict)
    group: type[BaseModel] | None = None
    container: type | None = None
    inner: "Accepted | None" = None
    limits: list[str] = field(default_factory=list)

    def add(self, annotation: Any) -> "Accepted":
        """Accept the values of an annotation too."""
        origin = get_origin(annotation)
        arguments = get_args(annotation)
        if origin is Annotated:
            self.add(arguments[0]).add_limits(arguments[1:])
        elif origin in (Union, UnionType):
            for member in arguments:
                self.add(member)
        elif origin is Literal:
            self.literals += arguments
        elif origin in (list, tuple, dict):
            self.container = origin
            self.inner = Accepted().add(arguments[1 if origin is dict else 0])
        elif annotation is NoneType:
            self.null = True
        elif annotation in TYPE_NAMES:
            self.types.append(annotation)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            tag = annotation.model_fields.get("name")
            names = get_args(tag.annotation) if tag else ()  # the values of a Literal
            self.choices |= dict.fromkeys(names, annotation)
            self.group = self.group if names else annotation
        return self

    def add_limits(self, metadata: Any) -> None:
        for mark in metadata:
            if isinstance(mark, FieldInfo):
                self.add_limits(mark.metadata)
            for key, name in LIMIT_NAMES.items():
                if (number := getattr(mark, key, None)) is not None:
                    self.limits.append(f"{name} {number:g}")

    @property
    def numeric(self) -> type | None:
        """The widest type of numbers that is accepted, float or int; None if no number is."""
        return next((kind for kind in (float, int) if kind in self.types), None)

    @property
    def inside(self) -> "Accepted":
        """What an item of a list or a value of a mapping accepts; otherwise `self`."""
        return self.inner or self

    @property
    def is_group_only(self) -> bool:
        """Whether only a mapping of settings is accepted."""
        return bool(self.group or self.choices) and not (self.types or self.literals or self.inner)

    @property
    def type_text(self) -> str:
        """The types, such as `whole number`, `number or auto`, `list of whole number`."""
        names = [TYPE_NAMES[kind] for kind in self.types]
        names += [show(value) for value in self.literals]
        if self.inner:
            kind = "mapping to" if self.container is dict else "list of"
            names.append(f"{kind} {self.inner.type_text}")
        if self.null:
            names.append("null")
        return " or ".join(names) or "group of settings"


@lru_cache(maxsize=4096)
def accepted(cls: type[BaseModel], key: str) -> Accepted:
    """What a field of a settings class accepts."""
    info = cls.model_fields[key]
    accepts = Accepted().add(info.annotation)
    accepts.add_limits(info.metadata)
    # null: derived from other settings
    accepts.null |= info.default_factory_takes_validated_data is True
    return accepts


def _read(value: Any, accepts: Accepted) -> Any:
    """A value with its numbers and sequences converted to the types that the field accepts."""
    if isinstance(value, str) and accepts.numeric and str not in accepts.types:
        return _read_number(value)
    if isinstance(value, float) and accepts.numeric is int and value.is_integer():
        return int(value)
    if accepts.inner and isinstance(value, (list, tuple)) and accepts.container in (list, tuple):
        return accepts.container(_read(item, accepts.inner) for item in value)
    if accepts.inner and isinstance(value, dict) and accepts.container is dict:
        return {key: _read(item, accepts.inner) for key, item in value.items()}
    return value


def _read_number(text: str) -> Any:
    """Convert a text such as 200M to its number; return other text unchanged."""
    match = _SUFFIXED.fullmatch(text)
    if match is None:
        return text
    number = Decimal(match[1].replace("_", "")) * 10 ** _POWERS[match[2]]
    return int(number) if number == int(number) else float(number)


def default_of(info: FieldInfo) -> Any:
    """The default of a field; None if it derives from other settings."""
    if info.default_factory_takes_validated_data:
        return None
    return info.get_default(call_default_factory=True)


def is_marked(info: FieldInfo, mark: str) -> bool:
    """Whether a field is marked `may_change`, or `counts_if_changed` (only if not its default)."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def walk(
    cls: type[BaseModel],
    prefix: str = "",
    above: tuple[type, ...] = (),
) -> Iterator[tuple[str, type[BaseModel], str | None]]:
    """Every setting below a class as (dotted name, class, key), default choices first, and every
    choice as (model.position.name=rope, class, None). A choice inside a choice of the same kind is
    not repeated."""
    for key, info in cls.model_fields.items():
        accepts = accepted(cls, key)
        if key == "name" and (accepts.literals or not prefix):
            continue
        name = f"{prefix}{key}"
        yield name, cls, key
        inner = accepts.inside
        below = f"{name}."
        if accepts.inner:
            below = f"{name}.KEY." if accepts.container is dict else f"{name}[]."
        default = getattr(default_of(info), "name", None)
        entered = (*above, *inner.choices.values())
        if inner.group is not None and inner.group not in above:
            yield from walk(inner.group, below, (*entered, inner.group))
        for choice in sorted(inner.choices, key=lambda choice: choice != default):
            if inner.choices[choice] not in above:
                yield f"{below}name={choice}", inner.choices[choice], None
                yield from walk(inner.choices[choice], below, entered)


@lru_cache
def leaves(cls: type[BaseModel]) -> list[str]:
    """The dotted name of every setting below a class that an override can set."""
    names = [name for name, _, key in walk(cls) if key and "[]" not in name and ".KEY" not in name]
    return list(dict.fromkeys(names))


def show(value: object, limit: int = 80) -> str:
    """A parsed value as short text for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        inside = ", ".join(f"{key}: {show(item)}" for key, item in value.items())
        return f"{{{inside}}}" if len(inside) < 60 else "{...}"
    text = str(value) if value != "" else "''"
    return text if len(text) <= limit else text[: limit - 3] + "..."
