"""Help on settings, from their classes: a setting, a group, a choice, or all of them."""

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from errors import ConfigError
from settings.accepted import accepted, default_of, is_marked, leaves, walk
from settings.value_text import show

SettingsClasses = Sequence[type[BaseModel]]


def named_settings(classes: SettingsClasses, arguments: Iterable[str]) -> list[str]:
    """The arguments that name settings, without overrides, files and directories."""
    known = {name for cls in classes for name in leaves(cls)}
    names = [text for text in arguments if re.fullmatch(r"[A-Za-z_][\w.]*(\.name=\w+)?", text)]
    return [name for name in names if name in known or not Path(name).exists()]


def describe_setting(
    classes: SettingsClasses, word: str, width: int | None = None, inside: bool = True
) -> str:
    """Help for one setting, group of settings or choice, named by its path or its last key; `all`
    for every setting. `inside`: with the settings and choices inside it. Raises ConfigError where
    there is none."""
    width = width or max(50, min(110, shutil.get_terminal_size((100, 24)).columns))
    pages = []
    known: list[str] = []
    for root in classes:
        places: dict[str, tuple[type[BaseModel], str | None]] = {}
        lines = []
        for name, cls, key in walk(root):
            places.setdefault(name, (cls, key))
            if word == "all":
                lines += _entry(name, cls, key, width)
        known += places
        if word == "all":
            pages.append("\n".join(lines))
            continue
        matches = _matches(list(places), word)
        for name in matches if inside else matches[:1]:
            cls, key = places[name]
            pages.append(_page(name, cls, key, width, inside))
    if not pages:
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        guess = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"--help {word}: no such setting{guess}")
    text = "\n\n".join(dict.fromkeys(pages))
    if inside and re.search(r"^[\w.\[\]=]+\*(\s|$)", text, re.MULTILINE):
        note = "* may change when a run is resumed; any other change makes a new run."
        text += "\n\n" + textwrap.fill(note, width)
    return text


def _matches(names: list[str], word: str) -> list[str]:
    """The settings and choices that a path such as model.position.rope names, or a last part such
    as rope."""
    word = word.replace(".name=", ".").removesuffix(".name")
    if word in names:
        return [word]
    choices = {name.replace(".name=", "."): name for name in names if ".name=" in name}
    if word in choices:
        return [choices[word]]
    ends = [name for path, name in choices.items() if path.endswith(f".{word}")]
    return ends or [name for name in names if name.endswith(f".{word}")]


def _page(
    name: str,
    cls: type[BaseModel],
    key: str | None,
    width: int,
    inside: bool,
) -> str:
    """A setting or choice; `inside`: with the settings of its group, or its choices in a line
    each."""
    lines = _entry(name, cls, key, width)
    if not inside:
        return "\n".join(lines)
    accepts = accepted(cls, key).inside if key else None
    group = accepts.group if accepts else cls
    if group is not None:
        prefix = name.partition("=")[0].removesuffix(".name")
        for inner in group.model_fields:
            if inner != "name":
                lines += _entry(f"{prefix}.{inner}", group, inner, width)
    choices = accepts.choices if accepts else {}
    column = max(map(len, choices), default=0) + 4
    for choice, settings in choices.items():
        summary = textwrap.shorten(
            _summary(settings),
            width - column - 2,
            placeholder=" ...",
        )
        lines.append(f"  {choice:<{column}}{summary}".rstrip())
    return "\n".join(lines)


def _entry(
    name: str,
    cls: type[BaseModel],
    key: str | None,
    width: int,
) -> list[str]:
    """`name  description (type, limits, default)`, in two columns."""
    column = min(40, width // 2)
    head = name
    text = _summary(cls)
    if key is not None:
        field = cls.model_fields[key]
        head += "*" if is_marked(field, "may_change") else ""
        text = _description(field, cls, key)
    lines = textwrap.wrap(text, max(20, width - column)) or [""]
    indented = [" " * column + line for line in lines]
    if len(head) + 2 > column:
        return [head, *indented]
    return [f"{head:<{column}}{lines[0]}".rstrip(), *indented[1:]]


def _description(field: FieldInfo, cls: type[BaseModel], key: str) -> str:
    accepts = accepted(cls, key)
    details = []
    if accepts.choices:
        details.append(f"one of {', '.join(accepts.choices)}")
    elif not accepts.group:
        details.append(accepts.type_text)
    details = [textwrap.shorten(text, 100, placeholder=" ...") for text in details]
    if accepts.limits:
        details.append(accepts.limits_text)
    default = None if field.is_required() else default_of(field)
    if isinstance(default, float):
        details.append(f"default {default:g}")
    elif accepts.choices and hasattr(default, "name"):
        details.append(f"default {default.name}")
    elif not field.is_required() and not isinstance(default, (BaseModel, dict)):
        value = list(default) if isinstance(default, tuple) else default
        details.append(f"default {show(value, 1000)}")
    text = " ".join((field.description or "").split()).rstrip(".")
    return f"{text} ({', '.join(details)})" if details else text


def _summary(cls: type[BaseModel]) -> str:
    """The first sentence of the docstring of a group or choice."""
    text = " ".join((cls.__doc__ or "").split())
    return re.split(r"(?<!al)\. ", text)[0].rstrip(".")
