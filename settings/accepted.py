"""What the fields of settings classes accept, read from their annotations."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from settings.value_text import show

TYPE_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
# Limits in annotations: name, and when a value is outside.
LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "gt": ("greater than", operator.le),
    "ge": ("at least", operator.lt),
    "lt": ("less than", operator.ge),
    "le": ("at most", operator.gt),
}


@dataclass
class Accepted:
    """The values that an annotation accepts, with unions and annotations resolved.

    Attributes:
        types: plain types: int, float, str, bool.
        choices: settings classes of which one is chosen by its `name`.
        group: the only settings class.
        sequence: list or tuple, with `item`, what an item accepts.
        value: what a value of a mapping with free keys accepts.
        limits: keys of LIMITS with their numbers.
    """

    types: list[type] = field(default_factory=list)
    literals: list[Any] = field(default_factory=list)
    null: bool = False
    anything: bool = False
    choices: dict[str, type[BaseModel]] = field(default_factory=dict)
    group: type[BaseModel] | None = None
    sequence: type | None = None
    item: "Accepted | None" = None
    value: "Accepted | None" = None
    limits: list[tuple[str, float]] = field(default_factory=list)

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
        elif origin in (list, tuple):
            self.sequence = origin
            self.item = Accepted().add(arguments[0])
        elif origin is dict:
            self.value = Accepted().add(arguments[1])
        elif annotation is NoneType:
            self.null = True
        elif annotation in TYPE_NAMES:
            self.types.append(annotation)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            names = choice_names(annotation)
            self.choices |= dict.fromkeys(names, annotation)
            self.group = self.group if names else annotation
        else:
            self.anything = True
        return self

    def add_limits(self, metadata: Any) -> None:
        for mark in metadata:
            if isinstance(mark, FieldInfo):
                self.add_limits(mark.metadata)
            for key in LIMITS:
                if getattr(mark, key, None) is not None:
                    self.limits.append((key, getattr(mark, key)))

    @property
    def numeric(self) -> type | None:
        """float or int, the wider type of numbers that is accepted; None for no number."""
        return next((kind for kind in (float, int) if kind in self.types), None)

    @property
    def inside(self) -> "Accepted":
        """What an item of a list or a value of a mapping accepts; otherwise this."""
        return self.value or self.item or self

    @property
    def is_group_only(self) -> bool:
        """Whether only a mapping of settings is accepted."""
        return bool(self.group or self.choices) and not (self.types or self.literals or self.item)

    @property
    def limits_text(self) -> str:
        """The limits, such as `at least 1 and at most 8`."""
        return " and ".join(f"{LIMITS[key][0]} {number:g}" for key, number in self.limits)

    @property
    def type_text(self) -> str:
        """The types, such as `whole number`, `number or auto`, `list of whole number`."""
        types = [kind for kind in self.types if kind is not int or self.numeric is int]
        names = [TYPE_NAMES[kind] for kind in types]
        names += [show(value) for value in self.literals]
        if self.choices:
            names.append("a choice by name")
        if self.group:
            names.append("a group of settings")
        if self.item:
            names.append(f"list of {self.item.type_text}")
        if self.value:
            names.append(f"mapping to {self.value.type_text}")
        if self.null:
            names.append("null")
        *first, last = names or ["anything"]
        return f"{', '.join(first)} or {last}" if first else last


def choice_names(cls: type[BaseModel]) -> tuple[str, ...]:
    """The values of `name` that choose a settings class; empty for a class that is no choice."""
    tag = cls.model_fields.get("name")
    is_choice = tag is not None and get_origin(tag.annotation) is Literal
    return get_args(tag.annotation) if tag and is_choice else ()


@lru_cache(maxsize=4096)
def accepted(cls: type[BaseModel], key: str) -> Accepted:
    """What a field of a settings class accepts."""
    about = cls.model_fields[key]
    accepts = Accepted().add(about.annotation)
    accepts.add_limits(about.metadata)
    accepts.null |= (
        about.default_factory_takes_validated_data is True
    )  # null: derived from other settings
    return accepts


def default_of(about: FieldInfo) -> Any:
    """The default of a field; None where it derives from other settings."""
    if about.default_factory_takes_validated_data:
        return None
    return about.get_default(call_default_factory=True)


def defaults(cls: type[BaseModel]) -> dict[str, Any]:
    """The default of every setting that has one, as a tree below files and overrides.

    Raises TypeError where a class below `cls` has a field `name` that is not the tag of a choice: a
    mapping with a `name` replaces the one before it when files are merged.
    """
    tree = {}
    for key, about in cls.model_fields.items():
        accepts = accepted(cls, key)
        group = accepts.inside.group
        if group is not None and "name" in group.model_fields:
            raise TypeError(f"{group.__name__}.name: `name` is reserved for the tag of a choice")
        if not about.is_required():
            value = default_of(about)
            tree[key] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif group is not None and group is accepts.group and not accepts.null:
            tree[key] = defaults(group)
    return tree


def is_marked(about: FieldInfo, mark: str) -> bool:
    """Whether a field is marked `may_change`, or `counts_if_changed` (only if not its default)."""
    extra = about.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def walk(
    cls: type[BaseModel], prefix: str = "", above: tuple[type, ...] = ()
) -> Iterator[tuple[str, type[BaseModel], str | None]]:
    """Every setting below a class as (dotted name, class, key), default choices first, and every
    choice as (model.position.name=rope, class, None). A choice inside a choice of its kind is not
    repeated."""
    for key, about in cls.model_fields.items():
        accepts = accepted(cls, key)
        if key == "name" and (accepts.literals or not prefix):
            continue
        name = f"{prefix}{key}"
        yield name, cls, key
        inner = accepts.inside
        below = f"{name}{'.KEY' if accepts.value else '[]' if accepts.item else ''}."
        default = getattr(default_of(about), "name", None)
        names = sorted(inner.choices, key=lambda choice: choice != default)
        entered = (*above, *inner.choices.values())
        if inner.group is not None and inner.group not in above:
            yield from walk(inner.group, below, (*entered, inner.group))
        for choice in names:
            if inner.choices[choice] not in above:
                yield f"{below}name={choice}", inner.choices[choice], None
                yield from walk(inner.choices[choice], below, entered)


def leaves(cls: type[BaseModel]) -> list[str]:
    """The dotted name of every setting below a class that an override can set."""
    names = [name for name, _, key in walk(cls) if key and "[]" not in name and ".KEY" not in name]
    return list(dict.fromkeys(names))
