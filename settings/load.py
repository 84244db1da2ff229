"""Loads settings from YAML files and command-line overrides, for any pydantic class.

Later files override earlier ones; command-line overrides come last.  Mappings are merged key by key; a
mapping with a `name` is a new choice and replaces the previous one.  All problems are reported together,
those of files with file and line.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from errors import ConfigError
from settings.schema import SchemaNode, defaults, leaves, schema_of
from settings.validate import MAX_LISTED, SettingsProblem, check, closest, from_pydantic
from settings.yaml_io import parse_yaml, read_yaml, write_yaml

S = TypeVar("S", bound=BaseModel)
_DOTTED = re.compile(r"^([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)$", re.DOTALL)


def load_settings(cls: type[S], arguments: list[str], below: dict | None = None) -> S:
    """Settings of class `cls` from YAML files and `a.b=value` overrides, in any order, on top of the class's
    defaults or of the tree `below`.

    Raises ConfigError listing every problem.
    """
    layers = SettingsLayers(defaults(schema_of(cls)) if below is None else below)
    layers.apply(arguments)
    return _validated(cls, layers)


def apply_overrides(settings: S, overrides: list[str]) -> S:
    """The same settings with overrides applied; files are rejected."""
    files, _ = split_arguments(overrides)
    if files:
        raise ConfigError(
            f"{files[0]}: use overrides such as model.position.window=256 here, not a file"
        )
    layers = SettingsLayers(settings.model_dump(mode="json"))
    layers.apply(overrides)
    return _validated(type(settings), layers)


def _validated(cls: type[S], layers: "SettingsLayers") -> S:
    schema = schema_of(cls)
    tree, found = layers.check(schema)
    settings = None
    try:
        settings = cls.model_validate(tree)
    except ValidationError as error:
        layers.report(from_pydantic(schema, tree, error, found))
    layers.raise_problems()
    assert settings is not None
    return settings


def setting_before_validation(arguments: list[str], key: str) -> object:
    """The value of a top-level key in files and overrides; None where it is not set. It selects the settings
    class to validate against, which reports the problems of files and overrides."""
    layers = SettingsLayers({})
    layers.apply(arguments)
    return layers.tree.get(key)


def dropped_settings(settings: BaseModel, arguments: list[str]) -> list[str]:
    """A warning for each line of a file that a later choice replaced, where that choice has the same setting
    with another value that no file or override set."""
    layers = SettingsLayers({})
    layers.apply(arguments)
    layers.raise_problems()
    warnings = []
    for (*place, key), value, origin in layers.dropped:
        choice = _at(settings, place)
        names = leaves(schema_of(type(choice))) if isinstance(choice, BaseModel) else ()
        same = [name for name in names if name.split(".")[-1] == key]
        name = key if key in same else same[0] if len(same) == 1 else None
        if name is None or key == "name":
            continue
        *inside, last = name.split(".")
        given = _at(layers.tree, [*place, *inside])
        now = to_jsonable_python(_at(choice, [*inside, last]))
        if now != value and not (isinstance(given, dict) and last in given):
            where = ".".join(place)
            chosen = getattr(choice, "name", "another")
            warnings.append(
                f"{origin}: {where}.{key} = {value} is dropped, because {chosen} was chosen after it: "
                f"{where}.{name} is {now}; set it after that choice"
            )
    return warnings


def _at(settings: object, path: Sequence[str]) -> object:
    """The value at a path below some settings; None where there is none."""
    for key in path:
        settings = settings.get(key) if isinstance(settings, dict) else getattr(settings, key, None)
    return settings


def is_override(argument: str) -> bool:
    """Whether a command-line argument is written `a.b=value`."""
    return _DOTTED.match(argument) is not None


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into YAML paths and overrides; raises ConfigError for others."""
    files = []
    overrides = []
    for one in arguments:
        if is_override(one):
            overrides.append(one)
        elif one.startswith("-"):
            raise ConfigError(
                f"{one}: unknown option; settings are written without dashes, as key=value"
            )
        elif one.endswith((".yaml", ".yml")) or "/" in one or Path(one).exists():
            files.append(one)
        elif re.fullmatch(r"[\w.-]+", one):
            raise ConfigError(
                f"{one}: neither a YAML file nor a setting; settings are written {one}=VALUE"
            )
        else:
            raise ConfigError(
                f"{one}: neither a YAML file nor a setting such as training.tokens=2M"
            )
    return files, overrides


def merge(base: dict, over: dict, path: tuple = (), replaced: list[tuple] | None = None) -> dict:
    """`base` with the values of `over`, merged mapping by mapping; adds the paths of replaced values of
    `base` to `replaced`.

    A mapping with a `name` replaces the one in `base`, except at the root.
    """
    merged = dict(base)
    for key, value in over.items():
        below = (*path, key)
        if (
            isinstance(old := base.get(key), dict)
            and isinstance(value, dict)
            and "name" not in value
        ):
            value = merge(old, value, below, replaced)
        elif key in base and replaced is not None:
            replaced.append(below)
        merged[key] = value
    return merged


class SettingsLayers:
    """Merges files and overrides, and records the line that set each value (empty for an override)."""

    def __init__(self, tree: dict):
        self.tree = tree
        self.origins: dict[tuple, str] = {}
        self.problems: list[str] = []
        # settings, values and lines of replaced choices
        self.dropped: list[tuple[tuple, object, str]] = []
        self.files: dict[str, list[str]] = {}  # keys at the top of each file
        self._overrides: list[tuple[tuple, str]] = []

    def apply(self, arguments: list[str]) -> None:
        """Merge files from left to right, then overrides; errors are added to `problems`."""
        files, overrides = split_arguments(arguments)
        steps = [(self.apply_file, Path(file)) for file in files]
        for apply, argument in [
            *steps,
            *((self.apply_override, override) for override in overrides),
        ]:
            try:
                apply(argument)
            except ConfigError as error:
                self.problems.append(str(error))

    def check(self, schema: SchemaNode) -> tuple[dict, list[SettingsProblem]]:
        """The merged tree without invalid values, and its problems, which are added to `problems` too."""
        tree, found = check(schema, self.tree)
        for file, keys in self.files.items():
            if len(keys) > 1 and not set(keys) & set(schema.fields):  # one message for the file
                found = [one for one in found if not self.where(one.path).startswith(f"{file}:")]
                self.problems.append(
                    f"{file}: none of its settings ({', '.join(keys[:MAX_LISTED])}) is known here, where "
                    f"they are {', '.join([*schema.fields][:MAX_LISTED])}: is it a file for another script?"
                )
        self.report(found)
        return tree, found

    def report(self, found: list[SettingsProblem]) -> None:
        """Add problems with the file and line that set the value."""
        self.problems += [f"{self.where(problem.path)}{problem.text}" for problem in found]

    def raise_problems(self) -> None:
        """Raise ConfigError if there are problems."""
        if self.problems:
            raise ConfigError("\n       ".join(self.problems))

    def where(self, path: tuple) -> str:
        """`file:line: ` of the nearest key at or above `path`; empty for an override."""
        above = (path[:length] for length in range(len(path), 0, -1))
        origin = next((self.origins[one] for one in above if one in self.origins), "")
        return f"{origin}: " if origin else ""

    def apply_file(self, file: Path, above: tuple[Path, ...] = ()) -> None:
        """Merge a file into the tree, after the files it extends."""
        if not file.is_file():
            raise ConfigError(_missing(file, above[-1] if above else None))
        if file.resolve() in [other.resolve() for other in above]:
            chain = " -> ".join(str(one) for one in (*above, file))
            raise ConfigError(f"{file}: extends itself ({chain}); remove one `extends`")
        tree, lines = read_yaml(file)
        parents = tree.pop("extends", [])
        self.files[str(file)] = list(tree)
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
        match = _DOTTED.match(override)
        assert match is not None
        path = tuple(match[1].split("."))
        value, _ = parse_yaml(match[2], override, numbered=False)
        tree: dict = {path[-1]: value}
        for key in reversed(path[:-1]):
            tree = {key: tree}
        is_choice = isinstance(value, dict) and "name" in value
        choice = path if is_choice else path[:-1] if path[-1] == "name" else ()
        for earlier, text in self._overrides if choice else ():
            if earlier[: len(choice)] == choice and earlier not in (choice, (*choice, "name")):
                raise ConfigError(
                    f"{override}: a new choice would discard {text}; put {override} before it"
                )
        self._overrides.append((path, override))
        self._merge(tree, {path[: i + 1]: "" for i in range(len(path))})

    def _merge(self, tree: dict, origins: dict[tuple, str]) -> None:
        replaced: list[tuple] = []
        merged = merge(self.tree, tree, replaced=replaced)
        for path in replaced:
            before = _at(self.tree, path)
            for key, value in before.items() if isinstance(before, dict) else ():
                if origin := self.origins.get((*path, key)):
                    self.dropped.append(((*path, key), value, origin))
            self.origins = {p: o for p, o in self.origins.items() if p[: len(path)] != path}
        self.tree = merged
        self.origins |= origins


def _missing(file: Path, extended_by: Path | None) -> str:
    start = f"{file} (extended by {extended_by})" if extended_by else f"{file}"
    folder = file.parent
    if file.is_dir():
        return f"{start}: a folder, not a YAML file"
    if not folder.is_dir():
        return f"{start}: no such file; the folder {folder} does not exist"
    names = sorted(one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml"))
    stems = {Path(name).stem: name for name in reversed(names)}
    if close := closest(file.stem, stems, 0.5):
        return f"{start}: no such file; did you mean {folder / stems[close]}?"
    return f"{start}: no such file; {folder} holds {', '.join(names) or 'no YAML files'}"


def dump(settings: BaseModel) -> str:
    """All settings as YAML; loading it gives equal settings."""
    return write_yaml(settings.model_dump(mode="json"))


def identity(settings: BaseModel) -> str:
    """Ten hex digits over every setting that is not `may_change`: equal settings, equal identity."""
    text = json.dumps(_identifying(settings), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _marked(field: FieldInfo, mark: str) -> bool:
    """Whether a field is marked `may_change`, or `counts_if_changed`: its default is not in the identity."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _identifying(value: Any) -> Any:
    if isinstance(value, BaseModel):
        kept = {
            key: getattr(value, key)
            for key, field in type(value).model_fields.items()
            if not _marked(field, "may_change")
            and not (_marked(field, "counts_if_changed") and getattr(value, key) == _default(field))
        }
        return _identifying(kept)
    if isinstance(value, dict):
        return {str(key): _identifying(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_identifying(item) for item in value]
    return to_jsonable_python(value)


def differences(
    a: Any, b: Any, dotted: str = "", free: bool = False
) -> list[tuple[str, object, object, bool]]:
    """(dotted name, value in a, value in b, may it change) of every differing setting, in field order.

    Two different choices of a kind are one difference, named by the choice, with both mappings as values.
    """
    pairs: list[tuple[str, Any, Any, bool]] | None = None
    if isinstance(a, BaseModel) and type(a) is type(b):
        fields = type(a).model_fields.items()
        pairs = [
            (k, getattr(a, k), getattr(b, k), free or _marked(f, "may_change")) for k, f in fields
        ]
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(key, a[key], b[key], free) for key in a]
    if pairs is not None:
        prefix = f"{dotted}." if dotted else ""
        return [one for key, x, y, may in pairs for one in differences(x, y, f"{prefix}{key}", may)]
    a = to_jsonable_python(a)
    b = to_jsonable_python(b)
    return [] if a == b else [(dotted, a, b, free)]
