"""Loads settings from YAML files and command-line overrides, for any settings class.

Later files override earlier ones; command-line overrides come last. Mappings are merged key by key;
a mapping with a `name` is a new choice and replaces the previous one. All problems are reported
together, those of files with file and line.
"""

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from errors import ConfigError
from settings.accepted import default_of, defaults, is_marked
from settings.fields import StrictSettings
from settings.messages import MAX_LISTED, closest, problems_of
from settings.value_text import show
from settings.yaml_io import parse_yaml, read_yaml, write_yaml

S = TypeVar("S", bound=StrictSettings)
_OVERRIDE = re.compile(r"^([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)$", re.DOTALL)


def load_settings(
    cls: type[S],
    arguments: Sequence[str],
    below: dict | None = None,
) -> S:
    """Settings of class `cls` from YAML files and `a.b=value` overrides, in any order, on top of
    the class's defaults or of the tree `below`.

    Raises ConfigError listing every problem.
    """
    layers = SettingsLayers(defaults(cls) if below is None else below)
    layers.apply(arguments)
    return layers.validated(cls)


def load_stored(cls: type[S], file: Path) -> S:
    """The settings in a file that this or an earlier version has written; see `load_settings`."""
    layers = SettingsLayers(defaults(cls))
    layers.apply([str(file)])
    layers.tree = cls.from_earlier_versions(layers.tree)
    return layers.validated(cls)


def apply_overrides(settings: S, overrides: Sequence[str]) -> S:
    """The same settings with overrides applied; files are rejected."""
    files, _ = split_arguments(overrides)
    if files:
        raise ConfigError(
            f"{files[0]}: use overrides such as model.position.window=256 here, not a file"
        )
    return load_settings(
        type(settings),
        overrides,
        below=settings.model_dump(mode="json"),
    )


def setting_before_validation(arguments: Sequence[str], key: str) -> object:
    """The value of a top-level key in files and overrides; None where it is not set. It selects the
    settings class to validate against, which reports the problems of files and overrides."""
    layers = SettingsLayers({})
    layers.apply(arguments)
    return layers.tree.get(key)


def dropped_settings(settings: BaseModel, arguments: Sequence[str]) -> list[str]:
    """A warning for each line of a file that a later choice replaced, where that choice has the
    same setting with another value that no file or override set."""
    layers = SettingsLayers({})
    layers.apply(arguments)
    warnings = []
    for path, value, origin in layers.dropped:
        *place, key = path
        now = to_jsonable_python(_at(settings, path))
        if key != "name" and _at(layers.tree, path) is None and now not in (None, value):
            where = ".".join(place)
            chosen = getattr(_at(settings, place), "name", "another")
            warnings.append(
                f"{origin}: {where}.{key} = {value} is dropped, because {chosen} was chosen after "
                f"it: {where}.{key} is {now}; set it after that choice"
            )
    return warnings


def _at(settings: object, path: Sequence[str]) -> Any:
    """The value at a path below some settings; None where there is none."""
    for key in path:
        settings = settings.get(key) if isinstance(settings, dict) else getattr(settings, key, None)
    return settings


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
            example = " such as training.tokens=2M"
            if files_of_name := sorted(Path("configs").rglob(f"{argument}.yaml")):
                example = f"; did you mean {files_of_name[0]}?"
            elif re.fullmatch(r"[\w.-]+", argument):
                example = f"; settings are written {argument}=VALUE"
            raise ConfigError(f"{argument}: neither a YAML file nor a setting{example}")
    return files, overrides


class DroppedSetting(NamedTuple):
    """A value of a file that a later choice replaced, with its file and line."""

    path: tuple
    value: object
    origin: str


class SettingsLayers:
    """Merges files and overrides, and records the line that set each value (empty for an
    override)."""

    def __init__(self, tree: dict):
        self.tree = tree
        self.origins: dict[tuple, str] = {}
        self.problems: list[str] = []
        self.dropped: list[DroppedSetting] = []
        self._keys: dict[str, list[str]] = {}  # keys at the top of each file
        self._overrides: list[tuple[tuple, str]] = []

    def apply(self, arguments: Sequence[str]) -> None:
        """Merge files from left to right, then overrides; errors are added to `problems`."""
        files, overrides = split_arguments(arguments)
        for file in files:
            try:
                self.apply_file(Path(file))
            except ConfigError as error:
                self.problems.append(str(error))
        for override in overrides:
            try:
                self.apply_override(override)
            except ConfigError as error:
                self.problems.append(str(error))

    def validated(self, cls: type[S]) -> S:
        """The settings. Raises ConfigError with every problem."""
        self._remove_settings_of_earlier_versions(cls)
        settings = None
        try:
            settings = cls.model_validate(self.tree)
        except ValidationError as error:
            self._report(cls, problems_of(cls, self.tree, error))
        if self.problems or settings is None:
            raise ConfigError("\n       ".join(self.problems))
        return settings

    def _report(
        self,
        cls: type[BaseModel],
        problems: list[tuple[tuple, str]],
    ) -> None:
        """Add problems with the file and line that set the value; one for a file of another
        script."""
        foreign = []
        for file, keys in self._keys.items():
            if len(keys) > 1 and not set(keys) & set(cls.model_fields):
                foreign.append(f"{file}:")
                self.problems.append(
                    f"{file}: none of its settings ({', '.join(keys[:MAX_LISTED])}) is known "
                    f"here, where they are {', '.join([*cls.model_fields][:MAX_LISTED])}: is it a "
                    "file for another script?"
                )
        for path, text in problems:
            origin = self._origin(path)
            if not origin.startswith(tuple(foreign)):
                self.problems.append(f"{origin}: {text}" if origin else text)

    def _remove_settings_of_earlier_versions(self, cls: type[StrictSettings]) -> None:
        for dotted, removed in cls.removed.items():
            *path, key = dotted.split(".")
            group = _at(self.tree, path)
            if not isinstance(group, dict) or key not in group:
                continue
            value = group.pop(key)
            origin = self._origin((*path, key)) or "override"
            text = f"{origin}: {dotted} = {show(value)}: {removed.reason}"
            if value != removed.default and removed.changes_numbers:
                self.problems.append(f"{text}; remove it")
            elif value != removed.default:
                print(f"note: {text}; it is ignored", file=sys.stderr)

    def _origin(self, path: tuple) -> str:
        """`file:line` of the nearest key at or above `path`; empty for an override."""
        above = (path[:length] for length in range(len(path), 0, -1))
        return next((self.origins[key] for key in above if key in self.origins), "")

    def apply_file(self, file: Path, above: tuple[Path, ...] = ()) -> None:
        """Merge a file into the tree, after the files it extends."""
        if not file.is_file():
            raise ConfigError(_missing(file, above[-1] if above else None))
        if file.resolve() in [other.resolve() for other in above]:
            chain = " -> ".join(str(link) for link in (*above, file))
            raise ConfigError(f"{file}: extends itself ({chain}); remove one `extends`")
        tree, lines = read_yaml(file)
        parents = tree.pop("extends", [])
        self._keys[str(file)] = list(tree)
        parents = [parents] if isinstance(parents, str) else parents
        if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
            raise ConfigError(
                f"{file}:{lines[('extends',)]}: extends must name a YAML file or a list of them"
            )
        for parent in parents:
            self.apply_file(file.parent / parent, (*above, file))
        self._merge(tree, {path: f"{file}:{line}" for path, line in lines.items()})

    def apply_override(self, override: str) -> None:
        """Merge one `a.b=value` into the tree."""
        match = _OVERRIDE.match(override)
        assert match is not None
        path = tuple(match[1].split("."))
        value, _ = parse_yaml(match[2], override, numbered=False)
        choice = ()
        if isinstance(value, dict) and "name" in value:
            choice = path
        elif path[-1] == "name":
            choice = path[:-1]
        for earlier, text in self._overrides if choice else ():
            if earlier[: len(choice)] == choice and earlier not in (choice, (*choice, "name")):
                raise ConfigError(
                    f"{override}: a new choice would discard {text}; put {override} before it"
                )
        self._overrides.append((path, override))
        tree: dict = {path[-1]: value}
        for key in reversed(path[:-1]):
            tree = {key: tree}
        self._merge(tree, {path[: i + 1]: "" for i in range(len(path))})

    def _merge(self, tree: dict, origins: dict[tuple, str]) -> None:
        replaced: list[tuple] = []
        merged = merge(self.tree, tree, replaced=replaced)
        for path in replaced:
            before = _at(self.tree, path)
            for key, value in before.items() if isinstance(before, dict) else ():
                if origin := self.origins.get((*path, key)):
                    self.dropped.append(DroppedSetting((*path, key), value, origin))
            self.origins = {p: o for p, o in self.origins.items() if p[: len(path)] != path}
        self.tree = merged
        self.origins |= origins


def merge(
    base: dict,
    over: dict,
    path: tuple = (),
    replaced: list[tuple] | None = None,
) -> dict:
    """`base` with the values of `over`, merged mapping by mapping; adds the paths of replaced
    values of `base` to `replaced`.

    A mapping with a `name` replaces the one in `base`, except at the root.
    """
    merged = dict(base)
    for key, value in over.items():
        below = (*path, key)
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and "name" not in value:
            value = merge(old, value, below, replaced)
        elif key in base and replaced is not None:
            replaced.append(below)
        merged[key] = value
    return merged


def _missing(file: Path, extended_by: Path | None) -> str:
    start = f"{file} (extended by {extended_by})" if extended_by else f"{file}"
    folder = file.parent
    if file.is_dir():
        return f"{start}: a folder, not a YAML file"
    if not folder.is_dir():
        return f"{start}: no such file; the folder {folder} does not exist"
    names = sorted(other.name for other in folder.iterdir() if other.suffix in (".yaml", ".yml"))
    stems = {Path(name).stem: name for name in reversed(names)}
    if close := closest(file.stem, stems, 0.5):
        return f"{start}: no such file; did you mean {folder / stems[close]}?"
    return f"{start}: no such file; {folder} holds {', '.join(names) or 'no YAML files'}"


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
    """A setting with different values; `may_change`: also when a run is resumed."""

    key: str
    old: object
    new: object
    may_change: bool


def differences(
    old: Any,
    new: Any,
    key: str = "",
    may_change: bool = False,
) -> list[Difference]:
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
    for name, before, after, is_free in members:
        inner = f"{key}.{name}" if key else name
        changed += differences(before, after, inner, may_change or is_free)
    return changed
