"""What settings classes say about themselves: fields, limits, choices of a kind, all valid keys.

Works on any pydantic class: read by config.py (checks, messages) and describe.py (the help text).
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_LIMITS = (
    (annotated_types.Gt, "gt", "greater than"),
    (annotated_types.Ge, "ge", "at least"),
    (annotated_types.Lt, "lt", "less than"),
    (annotated_types.Le, "le", "at most"),
)


@dataclass(frozen=True)
class Kind:
    """What may stand at one place: plain types, literals, one settings class, choices by name, containers."""

    scalars: tuple[type, ...] = ()
    literals: tuple = ()
    group: type[BaseModel] | None = None
    choices: tuple[tuple[str, type[BaseModel]], ...] = ()
    items: object = None  # annotation of a list's items
    values: object = None  # annotation of a mapping's values
    null: bool = False

    def choice(self, name: object) -> type[BaseModel] | None:
        return next((cls for known, cls in self.choices if known == name), None)


def kind_of_annotation(annotation: object) -> Kind:
    """Take a field's annotation apart; `Annotated` wrappers and type aliases are looked through."""
    scalars, literals, classes = [], [], []
    items = values = None
    null = False
    for member in _members(annotation):
        origin = typing.get_origin(member)
        if member is type(None):
            null = True
        elif origin is typing.Literal:
            literals.extend(typing.get_args(member))
        elif origin in (list, tuple, set, frozenset):
            items = (typing.get_args(member) or (object,))[0]
        elif origin is dict:
            values = (typing.get_args(member) or (object, object))[1]
        elif isinstance(member, type) and issubclass(member, BaseModel):
            classes.append(member)
        elif member in (list, tuple):
            items = object
        elif member is dict:
            values = object
        elif isinstance(member, type):
            scalars.append(member)
    named = [(name, cls) for cls in classes for name in choice_names(cls)]
    plain = [cls for cls in classes if not choice_names(cls)]
    return Kind(
        scalars=tuple(scalars),
        literals=tuple(literals),
        group=plain[0] if plain else None,
        choices=tuple(named),
        items=items,
        values=values,
        null=null,
    )


def _members(annotation: object) -> Iterator[object]:
    """The members of a union, flat; anything else is its own only member."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    elif (value := getattr(annotation, "__value__", None)) is not None:  # `type X = ...`
        yield from _members(value)
    else:
        yield annotation


def choice_names(cls: type[BaseModel]) -> tuple[str, ...]:
    """The values of a class's `name` tag, or () for a class that is not one choice of a kind."""
    field = cls.model_fields.get("name")
    if field is None:
        return ()
    names = kind_of_annotation(field.annotation).literals
    if not names:
        # `name` replaces everything beside it when settings are layered, so it cannot be an ordinary setting.
        raise TypeError(
            f"{cls.__name__}.name: `name` is reserved for choices of a kind; call this field otherwise"
        )
    return names


def limits(field: FieldInfo) -> str:
    """`at least 1 and at most 8`, from a field's constraints; empty where there are none."""
    found = []
    for item in field.metadata:
        for kind, attribute, words in _LIMITS:
            if isinstance(item, kind):
                found.append(f"{words} {getattr(item, attribute):g}")
    return " and ".join(found)


def may_change(field: FieldInfo) -> bool:
    """Whether this setting may differ when a run is resumed, and stays out of its identity."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("may_change"))


def counts_if_given(field: FieldInfo) -> bool:
    """Whether null or an empty list stays out of a run's identity: a setting that came later and changes
    nothing by itself."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("counts_if_given"))


_PLURALS = {
    "whole number": "whole numbers",
    "number": "numbers",
    "a group of settings": "groups of settings",
}


def type_words(annotation: object) -> str:
    """`whole number`, `number or auto`, `list of whole numbers`: a field's type as a reader would say it."""
    kind = kind_of_annotation(annotation)
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
    scalars = [one for one in kind.scalars if not (one is int and float in kind.scalars)]
    words = [names.get(scalar, scalar.__name__) for scalar in scalars]
    words += [_literal(value) for value in kind.literals]
    if kind.choices:
        words.append("a choice by name")
    if kind.group is not None:
        words.append("a group of settings")
    if kind.items is not None:
        item = type_words(kind.items)
        words.append("list of " + _PLURALS.get(item, item))
    if kind.values is not None:
        words.append("mapping to " + type_words(kind.values))
    if kind.null:
        words.append("null")
    return ", ".join(words[:-1]) + (" or " if words[:-1] else "") + words[-1] if words else "anything"


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def leaves(cls: type[BaseModel], prefix: str = "", above: tuple = ()) -> Iterator[str]:
    """Every dotted name below a class, through all choices; a class inside itself is entered once."""
    if cls in above:
        return
    for key, field in cls.model_fields.items():
        dotted = f"{prefix}{key}"
        kind = kind_of_annotation(field.annotation)
        yield dotted
        for _, below in _below(kind):
            yield from leaves(below, f"{dotted}.", (*above, cls))


def check_reserved(cls: type[BaseModel]) -> None:
    """Raise TypeError where a class below `cls` uses `name` for something other than the tag of a choice."""
    for _ in leaves(cls):  # walking takes every class apart, and `choice_names` refuses
        pass


def _below(kind: Kind) -> list[tuple[str | None, type[BaseModel]]]:
    found: list[tuple[str | None, type[BaseModel]]] = [(None, kind.group)] if kind.group else []
    return found + list(kind.choices)
