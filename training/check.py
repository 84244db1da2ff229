"""Checking a tree of settings against its classes, with messages a person can act on.

`tidy` walks the tree before pydantic does: unknown keys and choices are answered with the nearest valid one,
numbers such as 200M are read, and what pydantic would accept by accident is refused (true for 1, nan).
`problems_of` turns pydantic's own errors into sentences.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from training.schema import Kind, kind_of_annotation, leaves, limits, type_words
from training.yamltext import kind_of

_SUFFIXED = re.compile(r"^([-+]?[0-9][0-9_]*(?:\.[0-9]+)?|[-+]?\.[0-9]+)\s?([kKMBGT])$")
FEW = 12  # settings of a group that are listed
_POWERS = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}


@dataclass(frozen=True)
class Problem:
    """One thing wrong at `path`; `text` starts with the dotted name."""

    path: tuple
    text: str


def tidy(cls: type[BaseModel], tree: dict) -> tuple[dict, list[Problem]]:
    """A copy of `tree` with numbers read and what is refused left out, and the refusals."""
    walk = _Walk(cls)
    return walk.group(cls, tree, ()), walk.problems


class _Walk:
    def __init__(self, root: type[BaseModel]):
        self.root = root
        self.problems: list[Problem] = []

    def refuse(self, path: tuple, text: str) -> None:
        self.problems.append(Problem(path, text))

    def group(self, cls: type[BaseModel], tree: dict, path: tuple, kind: Kind | None = None) -> dict:
        kept = {}
        for key, value in tree.items():
            field = cls.model_fields.get(key)
            if field is None:
                owners = [name for name, other in kind.choices if key in other.model_fields] if kind else []
                self.refuse((*path, key), self.unknown(cls, (*path, key), tree.get("name"), owners))
            else:
                before = len(self.problems)
                value = self.value(field.annotation, value, (*path, key))
                if len(self.problems) == before or isinstance(value, (dict, list)):
                    kept[key] = value
        return kept

    def value(self, annotation: object, value: object, path: tuple) -> object:
        kind = kind_of_annotation(annotation)
        if isinstance(value, dict):
            return self.mapping(kind, value, path)
        if isinstance(value, list) and kind.items is not None:
            return [self.value(kind.items, item, (*path, i)) for i, item in enumerate(value)]
        if _wants_mapping(kind) and not (value is None and kind.null):
            self.refuse(path, _no_choice(kind, value, path) if kind.choices else _no_group(kind, value, path))
            return value
        return value if isinstance(value, list) else self.scalar(kind, annotation, value, path)

    def mapping(self, kind: Kind, value: dict, path: tuple) -> object:
        if kind.choices:
            name = value.get("name")
            if "name" not in value and kind.group is None and len(kind.choices) == 1:
                return self.group(kind.choices[0][1], value, path)
            cls = kind.choice(name)
            if cls is not None:
                return self.group(cls, value, path, kind)
            if kind.group is None:
                names = [str(known) for known, _ in kind.choices]
                self.refuse((*path, "name"), _unknown_choice(path, value, names))
                return value
        if kind.group is not None:
            return self.group(kind.group, value, path)
        if kind.values is not None:
            return {key: self.value(kind.values, item, (*path, key)) for key, item in value.items()}
        return value

    def scalar(self, kind: Kind, annotation: object, value: object, path: tuple) -> object:
        numeric = int in kind.scalars or float in kind.scalars
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(path, f"{_dotted(path)} = {value}: must be a finite number")
        elif isinstance(value, bool) and numeric and bool not in kind.scalars and value not in kind.literals:
            self.refuse(path, f"{_dotted(path)} = {_show(value)}: must be {_a(type_words(annotation))}")
        elif isinstance(value, str) and value not in kind.literals and str not in kind.scalars:
            if numeric and (match := _SUFFIXED.match(value)):
                number = Decimal(match[1].replace("_", "")) * 10 ** _POWERS[match[2]]
                return int(number) if number == int(number) else float(number)
            elif numeric:  # pydantic would read '010' and '1_0'
                close = difflib.get_close_matches(value, map(str, kind.literals), n=1, cutoff=0.6)
                guess = f"; did you mean {close[0]}?" if close else ""
                self.refuse(
                    path, f"{_dotted(path)} = {_show(value)}: must be {_a(type_words(annotation))}{guess}"
                )
            elif bool in kind.scalars:
                self.refuse(path, f"{_dotted(path)} = {value}: must be true or false")
        return value

    def unknown(self, cls: type[BaseModel], path: tuple, name: object, owners: list[str]) -> str:
        """The sentence about an unknown key; `owners` are the other choices of this kind that have it."""
        *above, key = path
        if owners:
            mend = f"choose {_dotted((*above, 'name'))}={owners[0]} first"
            if inside := [leaf for leaf in leaves(cls) if leaf.rsplit(".", 1)[-1] == key]:
                mend = f"with {name} it is {_dotted((*above, inside[0]))}"
            return f"{_dotted(path)} belongs to {', '.join(owners)}, not to {name}; {mend}"
        return f"{_dotted(path)} is not a setting; {self.nearest(cls, tuple(above), key)}"

    def nearest(self, cls: type[BaseModel], path: tuple, key: str) -> str:
        """The end of the sentence about an unknown key: the closest valid one, or all there are."""
        beside = [one for one in cls.model_fields if one != "name"]
        prefix = _dotted(path) + "." if path else ""
        is_small = bool(path) and len(beside) <= FEW  # all of it is said before settings of elsewhere are
        if close := difflib.get_close_matches(key, beside, n=1, cutoff=0.75):
            return f"did you mean {prefix}{close[0]}?"
        reach = prefix if is_small else ""
        everywhere = [name for name in dict.fromkeys(leaves(self.root)) if name.startswith(reach)]
        if same := [name for name in everywhere if name.rsplit(".", 1)[-1] == key]:
            return f"did you mean {same[0]}?" + (f" (or {', '.join(same[1:3])})" if len(same) > 1 else "")
        if close := difflib.get_close_matches(key, beside, n=1, cutoff=0.5):
            return f"did you mean {prefix}{close[0]}?"
        words = {name.rsplit(".", 1)[-1]: name for name in reversed(everywhere)}
        if close := difflib.get_close_matches(key, words, n=1, cutoff=0.7):
            return f"did you mean {words[close[0]]}?"
        here = f"of {_dotted(path)}" if path else "at the top level"
        return f"the settings {here} are {', '.join(beside)}"


def _wants_mapping(kind: Kind) -> bool:
    """Whether nothing but a mapping of settings may stand here."""
    return bool(kind.group or kind.choices) and not (kind.scalars or kind.literals or kind.items)


def _no_choice(kind: Kind, value: object, path: tuple) -> str:
    """The sentence about something else where a choice by name is wanted."""
    names, dotted = [str(known) for known, _ in kind.choices], _dotted(path)
    if value in names:
        return f"{dotted} = {value}: a choice is written {dotted}.name={value} (in YAML: {{name: {value}}})"
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.6)
    guess = f"did you mean {dotted}.name={close[0]}? " if close else f"write {dotted}.name=NAME; "
    null = " or null" if kind.null else ""
    return f"{dotted} = {_show(value)}: must be a choice by name{null}; {guess}known: {', '.join(names)}"


def _no_group(kind: Kind, value: object, path: tuple) -> str:
    """The sentence about something else where a group of settings is wanted: where it would fit in the group,
    the first such setting, as classes name what matters most first."""
    cls = kind.group
    assert cls is not None
    keys, dotted = list(cls.model_fields), _dotted(path)
    listed = f" ({', '.join(keys)})" if len(keys) <= FEW else ""
    start = f"{dotted} = {_show(value)}: must be a group of settings{listed}{' or null' if kind.null else ''}"
    fitting = [key for key in keys if _fits(cls, key, value)] if listed else []
    if any(isinstance(part, int) for part in path):  # an item of a list, which no dotted word can reach
        inside = f"{fitting[0]}: {_show(value)}" if fitting else f"{keys[0]}: VALUE"
        return f"{start}; write {{{inside}}}"
    if fitting:
        return f"{start}; write {dotted}.{fitting[0]}={_show(value)}"
    if any(field.is_required() for field in cls.model_fields.values()) or not listed:
        return f"{start}; write {dotted}.{keys[0]}=VALUE and so on"
    return f"{start}; write {dotted}.{keys[0]}=VALUE and so on, or {dotted}={{}} for its defaults"


def _fits(cls: type[BaseModel], key: str, value: object) -> bool:
    """Whether a setting of this class could be `value`."""
    annotation, walk = cls.model_fields[key].annotation, _Walk(cls)
    if _wants_mapping(kind_of_annotation(annotation)):
        return False
    read = walk.value(annotation, value, (key,))
    try:
        cls.model_validate({key: read})
    except ValidationError as error:
        return not walk.problems and all(item["loc"][:1] != (key,) for item in error.errors())
    return not walk.problems


def _unknown_choice(path: tuple, value: dict, names: list[str]) -> str:
    dotted, listed = _dotted(path), ", ".join(names)
    if "name" not in value:
        return f"{dotted} needs a name, one of {listed}"
    name = value["name"]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"{dotted}.name = {_show(name)} is unknown; {guess}known: {listed}"


def problems_of(
    cls: type[BaseModel], tree: dict, error: ValidationError, known: list[tuple]
) -> list[Problem]:
    """pydantic's errors as Problems, one per place; those that follow from `known` ones are left out."""
    found: dict[tuple, Problem] = {}
    for item in error.errors(include_url=False):
        path, field = _place(cls, tree, item)
        if path in found or any(path[: len(k)] == k or k[: len(path)] == path for k in known):
            continue
        found[path] = Problem(path, _sentence(path, field, item))
    return list(found.values())


def _place(cls: type[BaseModel], tree: object, item: Mapping[str, Any]) -> tuple[tuple, FieldInfo | None]:
    """The path and field an error is about; pydantic's `loc` also holds tags and names of union members."""
    path: list = []
    current: Any = tree
    field: FieldInfo | None = None
    group: type[BaseModel] | None = cls
    kind = Kind(group=cls)
    for i, part in enumerate(item["loc"]):
        last_missing = item["type"] == "missing" and i == len(item["loc"]) - 1
        inside_dict = isinstance(current, dict) and part in current
        inside_list = isinstance(current, list) and isinstance(part, int) and part < len(current)
        if not (last_missing or inside_dict or inside_list):
            continue
        path.append(part)
        current = current[part] if inside_dict or inside_list else None
        if group is not None and part in group.model_fields:
            field = group.model_fields[part]
            kind = kind_of_annotation(field.annotation)
        else:
            kind = kind_of_annotation(kind.values if inside_dict else kind.items)
            field = None
        group = kind.choice(current.get("name")) if isinstance(current, dict) else None
        if group is None and len(kind.choices) == 1:
            group = kind.choices[0][1]
        group = group or kind.group
    return tuple(path), field


def _sentence(path: tuple, field: FieldInfo | None, item: Mapping[str, Any]) -> str:
    dotted, value, what = _dotted(path), item["input"], item["type"]
    if what == "missing":
        return f"{dotted} must be given: {(field and field.description) or 'it has no default'}"
    if what in ("value_error", "assertion_error"):
        reason = str(item["ctx"]["error"])
        return f"{dotted}: {reason}" if dotted and dotted not in reason else reason
    start = f"{dotted} = {_show(value)}: " if dotted else f"{_show(value)}: "
    if what == "string_type" and isinstance(value, (bool, int, float)):
        return f"{start}must be text; put it between quotes"
    if what in ("too_short", "too_long"):
        least, most = item["ctx"].get("min_length"), item["ctx"].get("max_length")
        bound = f"at least {least}" if what == "too_short" else f"at most {most}"
        return f"{start}must hold {bound} items, not {item['ctx']['actual_length']}"
    if field is not None:
        wanted, range_words = type_words(field.annotation), limits(field)
        if what in ("greater_than", "greater_than_equal", "less_than", "less_than_equal") and range_words:
            return f"{start}out of range, must be {range_words}"
        if not what.startswith("string_") or what == "string_type":
            close = difflib.get_close_matches(
                str(value),
                [str(one) for one in kind_of_annotation(field.annotation).literals],
                n=1,
                cutoff=0.6,
            )
            guess = f"; did you mean {close[0]}?" if close and what == "literal_error" else ""
            got = "" if isinstance(value, (str, int, float)) and value != "" else f", not {kind_of(value)}"
            return f"{start}must be {_a(wanted)}{f', {range_words}' if range_words else ''}{got}{guess}"
    return f"{start}{item['msg'][0].lower()}{item['msg'][1:]}"


def _dotted(path: tuple) -> str:
    return ".".join(str(part) for part in path)


def _a(words: str) -> str:
    starts = ("whole", "number", "list", "mapping", "path")
    if words.startswith(starts):
        return f"a {words}"
    return (
        words
        if words.startswith(("a ", "text", "true or false")) or " or " not in words
        else f"one of {words}"
    )


def _show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        inside = ", ".join(f"{key}: {_show(item)}" for key, item in value.items())
        return f"{{{inside}}}" if len(inside) < 60 else "{...}"
    text = str(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= 80 else text[:77] + "..."
