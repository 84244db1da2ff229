"""Reads and writes a small, predictable YAML (1.2 scalars), with the line of every key.

PyYAML follows YAML 1.1, where `1e-3` is text, `no` is false, `010` is eight and `12:30` is 750.
Here numbers are decimal, only `true` and `false` are booleans, `null`, `~` and empty values are
null, all else is text.
"""

import copy
import functools
import re
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
MAX_VALUES = 100_000  # in one text; nested aliases can expand to any number
# characters that are invalid in paths and in UTF-8 files
_INVALID = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """Builds values and records the line of every key, by path."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def __init__(self, text: str):
        super().__init__(text)
        self.lines: dict[tuple, int] = {}
        self._count = 0

    def build(self, node: yaml.Node, path: tuple) -> object:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _invalid(node, f"more than {MAX_VALUES:,} values with its aliases")
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node)
        built = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _invalid(key_node, "a key must be one word")
            self._scalar(key_node)
            key = (*path, key_node.value)
            if key_node.value in built:
                first = self.lines[key]
                text = f"'{key_node.value}' is given twice (first on line {first}); keep one"
                raise _invalid(key_node, text)
            self.lines[key] = key_node.start_mark.line + 1
            built[key_node.value] = self.build(value_node, key)
        return built

    def _scalar(self, node: yaml.Node) -> object:
        if invalid := _INVALID.search(node.value):
            raise _invalid(node, f"the character {invalid[0]!a}")
        if node.tag not in (_TEXT, self.resolve(yaml.ScalarNode, node.value, (True, False))):
            raise _invalid(node, f"{node.value!r} with the tag {node.tag}; leave out the tag")
        try:
            return self.construct_object(node)
        except ValueError as error:  # an integer with more digits than Python parses
            raise _invalid(node, str(error)) from None


def _invalid(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would not read as text."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def ignore_aliases(self, data):
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            _tag,
            re.compile(rf"^(?:{_pattern})$"),
            list(_first),
        )


def parse_yaml(
    text: str,
    source: str,
    numbered: bool = True,
) -> tuple[object, dict[tuple, int]]:
    """The value of YAML `text`, and the line (from 1) of every key, by path.

    `source` is the name of the text in errors, followed by the line if `numbered`. Raises
    ConfigError for invalid YAML, and for duplicate or non-text keys.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.build(node, ()), loader.lines
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        problem = f"the character {chr(error.character)!a}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else None
        problem = error.problem or error.context
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter for "\UFFFFFFFF"
        line = None
        problem = str(error)
    except RecursionError:
        line = None
        problem = "nested too deeply"
    where = f"{source}:{line + 1}" if line is not None and numbered else source
    raise ConfigError(f"{where}: not valid YAML: {problem}")


@functools.cache
def _parsed(text: str, source: str) -> tuple[object, dict[tuple, int]]:
    """`parse_yaml` of a file, cached because the cells of a study share files."""
    return parse_yaml(text, source)


def read_yaml(file: Path) -> tuple[dict, dict[tuple, int]]:
    """The mapping in a YAML file and the line of each key; an empty file is an empty mapping."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not UTF-8 text (byte {error.start}), so not a settings file"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    value, lines = copy.deepcopy(_parsed(text, str(file)))
    if value is None:
        return {}, {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must be a mapping of settings (key: value)")
    return value, lines


def write_yaml(value: dict) -> str:
    """YAML text from which `parse_yaml` reads an equal value; keys keep their order."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
    )
