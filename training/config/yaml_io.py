"""Reads and writes a small, predictable YAML (1.2 scalars), with the line of every key.

PyYAML follows YAML 1.1, where `1e-3` is text, `no` is false, `010` is eight and `12:30` is 750. Here numbers
are decimal, only `true` and `false` are booleans, `null`, `~` and empty values are null, all else is text.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import yaml

from errors import ConfigError

_TEXT = "tag:yaml.org,2002:str"
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
MOST_VALUES = 100_000  # in one text; nested aliases can expand to any number
_NEVER = re.compile("[\0\ud800-\udfff]")  # characters that are invalid in paths and in UTF-8 files


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would not read as text."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def ignore_aliases(self, data):
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


def parse_yaml(text: str, source: str, numbered: bool = True) -> tuple[object, dict[tuple, int]]:
    """The value of YAML `text`, and the line (from 1) of every key, by path.

    `source` is the name of the text in errors, followed by the line if `numbered`. Raises ConfigError for
    invalid YAML, and for duplicate or non-text keys.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[tuple, int] = {}
        value = None if node is None else _build(loader, node, (), lines, source, (), itertools.count(1))
    except yaml.reader.ReaderError as error:
        where = f"{source}:{text.count(chr(10), 0, error.position) + 1}" if numbered else source
        raise ConfigError(f"{where}: not valid YAML: the character {chr(error.character)!a}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark and numbered else source
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter for "\UFFFFFFFF"
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None
    return value, lines


def _build(loader, node, path, lines, source, above, count: Iterator[int]):
    if next(count) > MOST_VALUES:
        raise yaml.MarkedYAMLError(
            problem=f"more than {MOST_VALUES:,} values with its aliases", problem_mark=node.start_mark
        )
    if any(node is other for other in above):
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: an alias that contains itself")
    above = (*above, node)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(loader, node)
    if isinstance(node, yaml.SequenceNode):
        return [
            _build(loader, child, (*path, i), lines, source, above, count)
            for i, child in enumerate(node.value)
        ]
    built = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{source}:{line}: a key must be one word")
        _scalar(loader, key_node)
        key = key_node.value
        if key in built:
            first = lines[(*path, key)]
            raise ConfigError(f"{source}:{line}: '{key}' is given twice (first on line {first}); keep one")
        lines[(*path, key)] = line
        built[key] = _build(loader, value_node, (*path, key), lines, source, above, count)
    return built


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> object:
    problem = None
    if found := _NEVER.search(node.value):
        problem = f"the character {found[0]!a}"
    elif node.tag not in (_TEXT, loader.resolve(yaml.ScalarNode, node.value, (True, False))):
        problem = f"{node.value!r} with the tag {node.tag}; leave out the tag"
    else:
        try:
            return loader.construct_object(node)
        except ValueError as error:  # an integer with more digits than Python parses
            problem = str(error)
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


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
    """YAML text from which `parse_yaml` reads an equal value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def kind_of(value: object) -> str:
    """The type of a parsed value, as text for a message."""
    if value is None:
        return "null"
    names = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a mapping" if isinstance(value, dict) else type(value).__name__)
