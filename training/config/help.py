"""Help on settings, from their JSON schema: a setting, a group, a choice, or all of them."""

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from errors import ConfigError
from training.config.schema import SchemaNode, leaves, walk


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
    width = width or _width()
    found = [page for schema in schemas if (page := _describe(schema, word, width, inside))]
    if not found:
        known = [name for schema in schemas for name, _ in walk(schema)]
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        raise ConfigError(f"--help {word}: no such setting{f'; did you mean {close[0]}?' if close else ''}")
    text = "\n\n".join(dict.fromkeys(found))
    if inside and re.search(r"^[\w.\[\]=]+\*(\s|$)", text, re.MULTILINE):
        note = "* may change when a run is resumed; any other change makes a new run."
        text += "\n\n" + textwrap.fill(note, width)
    return text


def _describe(schema: SchemaNode, word: str, width: int, inside: bool) -> str:
    if word == "all":
        return "\n".join(line for name, node in walk(schema) for line in _entry(name, node, width))
    pages = []
    for name, node in _find(schema, word):
        lines = _entry(name, node, width)
        if not inside:
            return "\n".join(lines)
        group = node if node.spec.get("properties") else node.inside.group
        for key, field in group.fields.items() if group else ():
            if key != "name":
                lines += _entry(f"{name.partition('=')[0].removesuffix('.name')}.{key}", field, width)
        if not node.spec.get("properties"):
            column = max((len(choice) for choice in node.inside.choices), default=0) + 4
            for choice, one in node.inside.choices.items():
                summary = textwrap.shorten(_summary(one), width - column - 2, placeholder=" ...")
                lines.append(f"  {choice:<{column}}{summary}".rstrip())
        pages.append("\n".join(lines))
    return "\n\n".join(dict.fromkeys(pages))


def _find(schema: SchemaNode, word: str) -> list[tuple[str, SchemaNode]]:
    """The settings and choices that a path such as model.position.rope names, or a last part such as rope."""
    word = word.replace(".name=", ".").removesuffix(".name")
    everything: dict[str, SchemaNode] = {}
    for name, node in walk(schema):
        everything.setdefault(name, node)
    if word in everything:
        return [(word, everything[word])]
    ends = f".{word}"
    by_choice = {name.replace(".name=", "."): name for name in everything if ".name=" in name}
    exact = [by_choice[word]] if word in by_choice else []
    names = exact or [name for plain, name in by_choice.items() if plain.endswith(ends)]
    names = names or [name for name in everything if name.endswith(ends)]
    return [(name, everything[name]) for name in names]


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
    lines = [head] if len(head) + 2 > column else []
    body = textwrap.wrap(text, max(20, width - column)) or [""]
    if not lines:
        lines, body = [f"{head:<{column}}{body[0]}".rstrip()], body[1:]
    return lines + [" " * column + line for line in body]


def _default(node: SchemaNode) -> list[str]:
    """The default as text: the name of a choice; nothing for a group."""
    if "default" not in node.spec:
        return []
    value = node.spec["default"]
    if isinstance(value, dict):
        return [f"default {value['name']}"] if node.choices and "name" in value else []
    if value is None or isinstance(value, bool):
        return [f"default {'null' if value is None else str(value).lower()}"]
    if value == "":
        return ["default ''"]
    return [f"default {value:g}" if isinstance(value, float) else f"default {value}"]


def _summary(node: SchemaNode) -> str:
    """The first sentence of the docstring of a group or choice."""
    return re.split(r"(?<!al)\. ", node.description)[0].rstrip(".")


def _width() -> int:
    return max(50, min(110, shutil.get_terminal_size((100, 24)).columns))
