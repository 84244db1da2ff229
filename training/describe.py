"""The help text of settings classes: every setting with type, default, limits and meaning."""

import difflib
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from training.errors import ConfigError
from training.schema import Kind, choice_names, kind_of_annotation, leaves, limits, may_change, type_words


def describe(cls: type[BaseModel], width: int | None = None, branch: str = "") -> str:
    """All settings of `cls` by dotted name, grouped, each choice of a kind with its own settings; or those of
    one branch alone, such as `training.checkpoint` or `model.position.name=rope`: '' where there is none.

    `width` in characters; by default that of the terminal, at most 110.  Settings that may change on
    resume are marked with *, where there are any.
    """
    width = width or max(50, min(110, shutil.get_terminal_size((100, 24)).columns))
    place, _, choice = branch.partition(".name=")
    deepest = 3 + place.count(".") if branch else 3
    names = [name for name in leaves(cls) if name.count(".") < deepest and f"{name}.".startswith(place)]
    column = min(max((len(name) for name in names), default=20) + 4, width // 2)
    lines: list[str] = []
    if not branch:
        _group(cls, "", 0, width, column, lines, ())
    for field in _fields(cls, place) if branch else ():
        found: list[str] = []
        if not choice:
            _field(place, field, 0, width, column, found, ())
        elif (chosen := kind_of_annotation(field.annotation).choice(choice)) is not None:
            _choice(f"{place}.", choice, chosen, 0, width, column, found, ())
        lines += found if "\n".join(found) not in "\n".join(lines) else []
    if not any(re.match(r"\s*[\w.\[\]=]+\*(\s|$)", line) for line in lines):
        return "\n".join(lines).strip("\n")
    lines += ["", *textwrap.wrap("* may change when a run is resumed; all others make another run.", width)]
    return "\n".join(lines).strip("\n")


def asked(words: Iterable[str], *classes: type[BaseModel]) -> list[str]:
    """The branches that words beside `--help` name; files, folders and `key=value` are passed over.

    Raises ConfigError for a word that looks like a branch and is one of none of these classes.
    """
    known = [name for cls in classes for name in leaves(cls)]
    found = []
    for word in words:
        word = word.removesuffix(".name")
        place, _, choice = word.partition(".name=")
        if place in known and (choice or place == word):
            found.append(word)
            kinds = [kind_of_annotation(field.annotation) for cls in classes for field in _fields(cls, place)]
            names = [str(name) for kind in kinds for name, _ in kind.choices]
            if choice and choice not in names:
                raise ConfigError(f"--help {word}: no such choice; known: {', '.join(dict.fromkeys(names))}")
        elif re.fullmatch(r"[A-Za-z_][\w.]*", word) and not Path(word).exists():
            close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            guess = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"--help {word}: no such setting{guess}")
    return found


def help_text(cls: type[BaseModel], words: Iterable[str], usage: str, example: str) -> str:
    """What `--help` prints: the branches that words name, or else `usage` with all settings."""
    if branches := asked(words, cls):
        return "\n\n".join(describe(cls, branch=branch) for branch in branches)
    heading = "settings, with defaults (in YAML files as nested mappings):"
    return f"{usage}\n{heading}\n\n{describe(cls)}\n\n{foot(example)}"


def foot(example: str) -> str:
    """The last line of a long help."""
    return f"--help {example} prints that setting and those inside it alone."


def _fields(cls: type[BaseModel], place: str) -> list[FieldInfo]:
    """The settings of this dotted name: several where choices of a kind share it."""
    classes, fields = [cls], []
    for key in place.split("."):
        fields = [one.model_fields[key] for one in classes if key in one.model_fields]
        kinds = [kind_of_annotation(field.annotation) for field in fields]
        classes = [kind.group for kind in kinds if kind.group]
        classes += [choice for kind in kinds for _, choice in kind.choices]
    return fields


def _group(cls, prefix, indent, width, column, lines, above) -> None:
    """Plain settings first, then groups and choices, each under its own heading.

    `above` holds (dotted name, classes) of the choices this group lies inside; not spelled out again.
    """
    later, own = [], inspect.get_annotations(cls)
    # A class's own settings before those it shares with others: they are what it is about.
    for key, field in sorted(cls.model_fields.items(), key=lambda item: item[0] not in own):
        if key == "name" and choice_names(cls):
            continue
        if _is_plain(field):
            _setting(f"{prefix}{key}", field, indent, width, column, lines)
        else:
            later.append((key, field))
    for key, field in later:
        if indent == 0:
            lines.append("")
        _field(f"{prefix}{key}", field, indent, width, column, lines, above)


def _inner(field: FieldInfo) -> Kind:
    """What stands at a setting, or at each place of a list or mapping."""
    kind = kind_of_annotation(field.annotation)
    return kind_of_annotation(kind.values or kind.items) if kind.values or kind.items else kind


def _is_plain(field: FieldInfo) -> bool:
    return _inner(field).group is None and not _inner(field).choices


def _field(dotted, field, indent, width, column, lines, above) -> None:
    """One setting and all that lie inside it."""
    kind, inner = kind_of_annotation(field.annotation), _inner(field)
    _setting(dotted, field, indent, width, column, lines)
    inside = f"{dotted}{'.KEY' if kind.values else '[]' if kind.items else ''}."
    if inner.group is not None:
        _group(inner.group, inside, indent + 2, width, column, lines, above)
    classes = {choice for _, choice in inner.choices}
    if again := [name for name, known in above if classes and classes <= known]:
        names = ", ".join(name for name, _ in inner.choices)
        _wrapped(f"{inside}name=...  as under {again[0]}: {names}", indent + 2, width, lines, indent + 6)
        return
    for name, choice in inner.choices:
        _choice(inside, name, choice, indent + 2, width, column, lines, (*above, (dotted, classes)))


def _choice(inside, name, cls, indent, width, column, lines, above) -> None:
    """A choice of a kind, with what it is about, and its settings."""
    text, summary = f"{inside}name={name}", _summary(cls)
    _wrapped(f"{text}  {summary}" if summary else text, indent, width, lines, indent + 4)
    _group(cls, inside, indent + 2, width, column, lines, above)


def _setting(dotted: str, field: FieldInfo, indent: int, width: int, column: int, lines: list[str]) -> None:
    kind = kind_of_annotation(field.annotation)
    head = " " * indent + dotted + ("*" if may_change(field) else "")
    parts = [] if kind.group is not None and not kind.choices else [type_words(field.annotation)]
    if range_words := limits(field):
        parts.append(range_words)
    default = _default(field)
    if default is not None:
        parts.append(f"default {default}")
    text = field.description or ""
    if parts:
        text = f"{text.rstrip('.')} ({', '.join(parts)})" if text else f"({', '.join(parts)})"
    if len(head) + 2 > column:
        lines.append(head)
        head = ""
    body = textwrap.wrap(text, max(20, width - column)) or [""]
    lines.append(f"{head:<{column}}{body[0]}".rstrip())
    lines += [" " * column + line for line in body[1:]]


def _default(field: FieldInfo) -> str | None:
    """The default in words: a choice by its name, a group not at all (its settings show theirs)."""
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return getattr(value, "name", None)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(repr(item) if isinstance(item, str) else str(item) for item in value) + "]"
    return str(value) if value != "" else "''"


def _summary(cls: type[BaseModel]) -> str:
    """The first sentence of a class's own docstring."""
    text = " ".join((cls.__doc__ or "").split()) if "__doc__" in cls.__dict__ else ""
    return re.split(r"(?<!al)\. ", text)[0].rstrip(".")


def _wrapped(text: str, indent: int, width: int, lines: list[str], hang: int | None = None) -> None:
    lines += textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hang is None else hang),
        break_long_words=False,
    )
