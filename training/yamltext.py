"""YAML in and out: a small, predictable YAML (1.2 scalars), with the line of every key.

pyyaml follows YAML 1.1, where `1e-3` is text, `no` is false, `010` is eight and `12:30` is 750.  Here numbers
are decimal, only `true` and `false` are truth values, `null`, `~` and nothing are null, all else is text.
"""

import re
from pathlib import Path
from typing import ClassVar

import yaml

from training.errors import ConfigError

_SCALARS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what `_Loader` would not read back as text."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def ignore_aliases(self, data):
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


def parse_yaml(text: str, source: str, numbered: bool = True) -> tuple[object, dict[tuple, int]]:
    """The value `text` describes and the line (from 1) of every key, by path.

    `source` names the text in errors, with the line if `numbered`.  Raises ConfigError for bad YAML and
    for keys that are given twice or are not text.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[tuple, int] = {}
        value = None if node is None else _build(loader, node, (), lines, source, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark and numbered else source
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    return value, lines


def _build(loader, node, path, lines, source, above):
    if any(node is other for other in above):
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: an alias that contains itself")
    above = (*above, node)
    if isinstance(node, yaml.ScalarNode):
        try:
            return loader.construct_object(node)
        except ValueError as error:
            raise ConfigError(f"{source}:{node.start_mark.line + 1}: {error}") from None
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*path, i), lines, source, above) for i, child in enumerate(node.value)]
    built = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{source}:{line}: a key must be one word")
        key = key_node.value
        if key in built:
            first = lines[(*path, key)]
            raise ConfigError(f"{source}:{line}: '{key}' is given twice (first on line {first}); keep one")
        lines[(*path, key)] = line
        built[key] = _build(loader, value_node, (*path, key), lines, source, above)
    return built


def read_yaml(file: Path) -> tuple[dict, dict[tuple, int]]:
    """The mapping in a YAML file and the line of each key; an empty file is an empty mapping."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}), so not a settings file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    value, lines = parse_yaml(text, str(file))
    if value is None:
        return {}, {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must be a mapping of settings (key: value), but it is {kind_of(value)}")
    return value, lines


def write_yaml(value: dict) -> str:
    """YAML text that `parse_yaml` reads back equal, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def kind_of(value: object) -> str:
    """What a parsed value is, in words for a message."""
    if value is None:
        return "null"
    names = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a mapping" if isinstance(value, dict) else type(value).__name__)
