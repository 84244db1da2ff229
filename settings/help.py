"""Help on settings, from their JSON schema: a setting, a group, a choice, or all of them."""

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from errors import ConfigError
from settings.schema import SchemaNode, leaves, walk
from settings.yaml_io import show


def named_settings(schemas: Sequence[SchemaNode], arguments: Iterable[str]) -> list[str]:
    """The arguments that name settings, without overrides, files and directories."""
    known = {name for schema in schemas for name in leaves(schema)}
    names = [one for one in arguments if re.fullmatch(r"[A-Za-z_][\w.]*(\.name=\w+)?", one)]
    return [name for name in names if name in known or not Path(name).exists()]


def describe_setting(
    schemas: Sequence[SchemaNode], word: str, width: int | None = None, inside: bool = True
) -> str:
    """Help for one setting, group of settings or choice, named by its path or its last key; `all` for every
    setting.  `inside`: with the settings and choices inside it.  Raises ConfigError where there is none."""
    width = width or max(50, min(110, shutil.get_terminal_size((100, 24)).columns))
    pages = []
    for schema in schemas:
        settings: dict[str, SchemaNode] = {}
        for name, node in walk(schema):
            settings.setdefault(name, node)
        if word == "all":
            pages.append("\n".join(line for one in walk(schema) for line in _entry(*one, width)))
            continue
        found = [_page(name, settings[name], width, inside) for name in _matches([*settings], word)]
        pages += found if inside else found[:1]
    if not pages:
        close = difflib.get_close_matches(
            word, [name for schema in schemas for name, _ in walk(schema)], n=1, cutoff=0.5
        )
        raise ConfigError(
            f"--help {word}: no such setting{f'; did you mean {close[0]}?' if close else ''}"
        )
    text = "\n\n".join(dict.fromkeys(pages))
    if inside and re.search(r"^[\w.\[\]=]+\*(\s|$)", text, re.MULTILINE):
        note = "* may change when a run is resumed; any other change makes a new run."
        text += "\n\n" + textwrap.fill(note, width)
    return text


def _matches(names: Sequence[str], word: str) -> list[str]:
    """The settings and choices that a path such as model.position.rope names, or a last part such as rope."""
    word = word.replace(".name=", ".").removesuffix(".name")
    by_choice = {name.replace(".name=", "."): name for name in names if ".name=" in name}
    for known in ({name: name for name in names}, by_choice):
        if word in known:
            return [known[word]]
    choices = [name for path, name in by_choice.items() if path.endswith(f".{word}")]
    return choices or [name for name in names if name.endswith(f".{word}")]


def _page(name: str, node: SchemaNode, width: int, inside: bool) -> str:
    """A setting or choice; `inside`: with the settings of its group, or its choices in a line each."""
    lines = _entry(name, node, width)
    is_group = bool(node.spec.get("properties"))
    group = node if is_group else node.inside.group
    for key, field in group.fields.items() if group and inside else ():
        if key != "name":
            lines += _entry(f"{name.partition('=')[0].removesuffix('.name')}.{key}", field, width)
    choices = node.inside.choices if inside and not is_group else {}
    column = max(map(len, choices), default=0) + 4
    for choice, one in choices.items():
        summary = textwrap.shorten(_summary(one), width - column - 2, placeholder=" ...")
        lines.append(f"  {choice:<{column}}{summary}".rstrip())
    return "\n".join(lines)


def _entry(name: str, node: SchemaNode, width: int) -> list[str]:
    """`name  description (type, limits, default)`, in two columns."""
    column = min(40, width // 2)
    if node.spec.get("properties"):
        text = _summary(node)
    else:
        types = [node.type_text] if not (node.group or node.choices) else []
        types += [f"one of {', '.join(node.choices)}"] if node.choices else []
        types = [textwrap.shorten(one, 100, placeholder=" ...") for one in types]
        limits = [node.range_text] if node.range else []
        details = ", ".join([*types, *limits, *_default(node)])
        text = node.description.rstrip(".") + (f" ({details})" if details else "")
    head = name + ("*" if node.may_change else "")
    lines = textwrap.wrap(text, max(20, width - column)) or [""]
    lines = (
        [head, *lines]
        if len(head) + 2 > column
        else [f"{head:<{column}}{lines[0]}".rstrip(), *lines[1:]]
    )
    return [lines[0], *(" " * column + line for line in lines[1:])]


def _default(node: SchemaNode) -> list[str]:
    """The default as text: the name of a choice; nothing for a group."""
    value = node.spec.get("default", {})
    if isinstance(value, dict):
        return [f"default {value['name']}"] if node.choices and "name" in value else []
    return [f"default {value:g}" if isinstance(value, float) else f"default {show(value, 1000)}"]


def _summary(node: SchemaNode) -> str:
    """The first sentence of the docstring of a group or choice."""
    return re.split(r"(?<!al)\. ", node.description)[0].rstrip(".")
