"""The help text of settings classes: every setting with type, default, limits and meaning."""

import inspect
import re
import shutil
import textwrap

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from training.schema import choice_names, kind_of_annotation, leaves, limits, may_change, type_words


def describe(cls: type[BaseModel], width: int | None = None) -> str:
    """All settings of `cls` by dotted name, grouped, each choice of a kind with its own settings.

    `width` in characters; by default that of the terminal, at most 110.  Settings that may change on
    resume are marked with *, where there are any.
    """
    width = width or max(50, min(110, shutil.get_terminal_size((100, 24)).columns))
    lines: list[str] = []
    names = [name for name in leaves(cls) if name.count(".") < 3]
    column = min(max((len(name) for name in names), default=20) + 4, width // 2)
    _group(cls, "", 0, width, column, lines, ())
    if not any(re.match(r"\s*[\w.\[\]=]+\*(\s|$)", line) for line in lines):
        return "\n".join(lines).strip("\n")
    lines += ["", *textwrap.wrap("* may change when a run is resumed; all others make another run.", width)]
    return "\n".join(lines).strip("\n")


def _group(cls, prefix, indent, width, column, lines, above) -> None:
    """Plain settings first, then groups and choices, each under its own heading.

    `above` holds (dotted name, classes) of the choices this group lies inside; not spelled out again.
    """
    later, own = [], inspect.get_annotations(cls)
    # A class's own settings before those it shares with others: they are what it is about.
    for key, field in sorted(cls.model_fields.items(), key=lambda item: item[0] not in own):
        if key == "name" and choice_names(cls):
            continue
        kind = kind_of_annotation(field.annotation)
        inner = kind_of_annotation(kind.values or kind.items) if kind.values or kind.items else kind
        if inner.group is None and not inner.choices:
            _setting(f"{prefix}{key}", field, indent, width, column, lines)
        else:
            later.append((key, field, inner, ".KEY" if kind.values else "[]" if kind.items else ""))
    for key, field, kind, each in later:
        dotted = f"{prefix}{key}"
        if indent == 0:
            lines.append("")
        _setting(dotted, field, indent, width, column, lines)
        inside = f"{dotted}{each}."
        if kind.group is not None:
            _group(kind.group, inside, indent + 2, width, column, lines, above)
        classes = {choice for _, choice in kind.choices}
        again = [name for name, known in above if classes and classes <= known]
        if again:
            names = ", ".join(name for name, _ in kind.choices)
            _wrapped(f"{inside}name=...  as under {again[0]}: {names}", indent + 2, width, lines, indent + 6)
            continue
        for name, choice in kind.choices:
            text = f"{inside}name={name}"
            summary = _summary(choice)
            _wrapped(f"{text}  {summary}" if summary else text, indent + 2, width, lines, indent + 6)
            _group(choice, inside, indent + 4, width, column, lines, (*above, (dotted, classes)))


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
