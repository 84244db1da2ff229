"""Loads settings from YAML files and command-line overrides, for any settings class.

Later files override earlier ones; command-line overrides come last, those that make a choice by
`name` before all others. Mappings are merged key by key; a mapping with a `name` is a new choice
and replaces the previous one. All problems are reported together, problems in files with file and
line.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from errors import ConfigError
from settings.fields import StrictSettings, accepted, default_of, is_marked, show
from settings.messages import nearest, problems_of
from settings.yaml_io import parse_yaml, read_yaml, write_yaml

S = TypeVar("S", bound=StrictSettings)
_OVERRIDE = re.compile(r"^([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)$", re.DOTALL)


def load_settings(cls: type[S], arguments: Sequence[str], below: dict | None = None) -> S:
    """Settings of class `cls` from YAML files and `a.b=value` overrides, in any order, on top of
    the class's defaults or of the tree `below`.

    Raises ConfigError listing every problem.
    """
    return SettingsLayers(arguments, defaults(cls) if below is None else below).validated(cls)


def apply_overrides(settings: S, overrides: Sequence[str]) -> S:
    """The same settings with overrides applied."""
    return load_settings(type(settings), overrides, below=settings.model_dump(mode="json"))


def defaults(cls: type[BaseModel]) -> dict[str, Any]:
    """The default of every setting that has one, as a tree below files and overrides."""
    tree = {}
    for key, info in cls.model_fields.items():
        accepts = accepted(cls, key)
        if not info.is_required():
            value = default_of(info)
            tree[key] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif accepts.group is not None and not accepts.null:
            tree[key] = defaults(accepts.group)
    return tree


def setting_before_validation(arguments: Sequence[str], key: str) -> object:
    """The value of a top-level key in files and overrides; None if it is not set. It selects the
    settings class, whose validation reports the problems of files and overrides."""
    return SettingsLayers(arguments).tree.get(key)


def is_override(argument: str) -> bool:
    """Whether a command-line argument is written `a.b=value`."""
    return _OVERRIDE.match(argument) is not None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into YAML paths and overrides; raises ConfigError for others."""
    files = []
    overrides = []
    for argument in arguments:
        if is_override(argument):
            overrides.append(argument)
        elif argument.startswith("-"):
            raise ConfigError(
                f"{argument}: unknown option; settings are written without dashes, as key=value"
            )
        elif argument.endswith((".yaml", ".yml")) or "/" in argument or Path(argument).exists():
            files.append(argument)
        else:
            example = "settings are written key=value"
            if files_of_name := sorted(Path("configs").rglob(f"{argument}.yaml")):
                example = f"did you mean {files_of_name[0]}?"
            raise ConfigError(f"{argument}: neither a YAML file nor a setting; {example}")
    return files, overrides


class SettingsLayers:
    """Files and overrides, merged on top of a tree: files from left to right, then overrides.

    Attributes:
        origins: `file:line` that set each value, by path; empty for an override.
        problems: errors so far.
    """

    def __init__(self, arguments: Sequence[str], below: dict | None = None):
        self.tree = below or {}
        self.origins: dict[tuple, str] = {}
        self.problems: list[str] = []
        files, overrides = split_arguments(arguments)
        steps = [partial(self._apply_file, Path(file)) for file in files]
        overrides.sort(key=_choice_level)
        steps += [partial(self._apply_override, word) for word in overrides]
        for apply in steps:
            try:
                apply()
            except ConfigError as error:
                self.problems.append(str(error))

    def validated(self, cls: type[S]) -> S:
        """The settings. Raises ConfigError with every problem."""
        self._remove_settings_of_earlier_versions(cls)
        settings = None
        try:
            settings = cls.model_validate(self.tree)
        except ValidationError as error:
            for path, text in problems_of(cls, self.tree, error):
                origin = self._origin(path)
                self.problems.append(f"{origin}: {text}" if origin else text)
        if self.problems or settings is None:
            raise ConfigError("\n       ".join(self.problems))
        return settings

    def _remove_settings_of_earlier_versions(self, cls: type[StrictSettings]) -> None:
        for dotted, removed in cls.removed.items():
            *path, key = dotted.split(".")
            group: Any = self.tree
            for part in path:
                group = group.get(part) if isinstance(group, dict) else None
            if not isinstance(group, dict) or key not in group:
                continue
            value = group.pop(key)
            if value != removed.default:
                origin = self._origin((*path, key)) or "override"
                text = f"{origin}: {dotted} = {show(value)}: {removed.reason}; it is ignored"
                print(f"note: {text}", file=sys.stderr)

    def _origin(self, path: tuple) -> str:
        """`file:line` of the nearest key at or above `path`; empty for an override."""
        above = (path[:length] for length in range(len(path), 0, -1))
        return next((self.origins[key] for key in above if key in self.origins), "")

    def _apply_file(self, file: Path, above: tuple[Path, ...] = ()) -> None:
        """Merge a file into the tree, after the files it extends."""
        if not file.is_file():
            raise ConfigError(_missing(file, above[-1] if above else None))
        if file.resolve() in [other.resolve() for other in above]:
            chain = " -> ".join(str(link) for link in (*above, file))
            raise ConfigError(f"{file}: extends itself ({chain}); remove one `extends`")
        tree, lines = read_yaml(file)
        parents = tree.pop("extends", [])
        parents = [parents] if isinstance(parents, str) else parents
        if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
            raise ConfigError(
                f"{file}:{lines[('extends',)]}: extends must name a YAML file or a list of them"
            )
        for parent in parents:
            self._apply_file(file.parent / parent, (*above, file))
        self._merge(tree, {path: f"{file}:{line}" for path, line in lines.items()})

    def _apply_override(self, override: str) -> None:
        """Merge one `a.b=value` into the tree."""
        dotted, _, text = override.partition("=")
        path = tuple(dotted.split("."))
        value, lines = parse_yaml(text, override, numbered=False)
        tree: dict = {path[-1]: value}
        for key in reversed(path[:-1]):
            tree = {key: tree}
        paths = [path[:length] for length in range(1, len(path) + 1)]
        paths += [(*path, *inner) for inner in lines]
        self._merge(tree, dict.fromkeys(paths, ""))

    def _merge(self, tree: dict, origins: dict[tuple, str]) -> None:
        self.tree = merge(self.tree, tree)
        self.origins |= origins


def _choice_level(override: str) -> float:
    """Sort key: overrides that make a choice by `name` come before all others, outer choices first,
    so that none discards what another override sets."""
    key, _, text = override.partition("=")
    if re.match(r"\s*\{[^{}]*\bname\s*:", text):
        key += ".name"
    return key.count(".") if key.endswith(".name") else math.inf


def merge(base: dict, over: dict) -> dict:
    """`base` with the values of `over`, merged mapping by mapping. A mapping with a `name` replaces
    the one in `base`."""
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and "name" not in value:
            value = merge(old, value)
        merged[key] = value
    return merged


def _missing(file: Path, extended_by: Path | None) -> str:
    start = f"{file} (extended by {extended_by})" if extended_by else f"{file}"
    files = {path.stem: path for path in sorted(file.parent.glob("*.y*ml"))}
    close = nearest(file.stem, files, 0.5)
    return f"{start}: no such YAML file" + (f"; did you mean {files[close]}?" if close else "")


def dump(settings: BaseModel) -> str:
    """All settings as YAML; loading it gives equal settings."""
    return write_yaml(settings.model_dump(mode="json"))


def identity(settings: BaseModel) -> str:
    """Ten hex digits over every setting that is not `may_change`: equal settings, equal
    identity."""
    text = json.dumps(identifying(settings), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def identifying(value: Any) -> Any:
    """The settings that count in an identity, as JSON."""
    if isinstance(value, BaseModel):
        kept = {}
        for key, field in type(value).model_fields.items():
            item = getattr(value, key)
            is_default = is_marked(field, "counts_if_changed") and item == default_of(field)
            if not is_marked(field, "may_change") and not is_default:
                kept[key] = identifying(item)
        return kept
    if isinstance(value, dict):
        return {str(key): identifying(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [identifying(item) for item in value]
    return to_jsonable_python(value)


class Difference(NamedTuple):
    """A setting whose values differ. `may_change`: a resumed run may differ in it."""

    key: str
    old: object
    new: object
    may_change: bool


def differences(old: Any, new: Any, key: str = "", may_change: bool = False) -> list[Difference]:
    """Every differing setting, in field order.

    Two different choices of a kind are one difference, named by the choice, with both mappings as
    values.
    """
    members: list[tuple[str, Any, Any, bool]] | None = None
    if isinstance(old, BaseModel) and type(old) is type(new):
        members = [
            (name, getattr(old, name), getattr(new, name), is_marked(field, "may_change"))
            for name, field in type(old).model_fields.items()
        ]
    elif isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        members = [(name, old[name], new[name], False) for name in old]
    if members is None:
        old = to_jsonable_python(old)
        new = to_jsonable_python(new)
        return [] if old == new else [Difference(key, old, new, may_change)]
    changed = []
    for name, before, after, is_allowed in members:
        inner = f"{key}.{name}" if key else name
        changed += differences(before, after, inner, may_change or is_allowed)
    return changed
