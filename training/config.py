"""Settings from YAML files and dotted words, for any pydantic class.

Files are laid from left to right over the class's defaults, dotted words last, in their order.  Later beats
earlier, mapping by mapping; a mapping that carries a `name` is a fresh choice and replaces what stood there.
All problems of a load are reported together, those of files with file and line.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from training.check import problems_of, tidy
from training.describe import describe
from training.errors import ConfigError
from training.schema import check_reserved, counts_if_given, kind_of_annotation, leaves, may_change
from training.yamltext import parse_yaml, read_yaml, write_yaml

__all__ = [
    "apply_words",
    "asked_for",
    "describe",
    "differences",
    "discarded",
    "dump",
    "identity",
    "load_settings",
    "merge",
    "split_words",
]

S = TypeVar("S", bound=BaseModel)
_DOTTED = re.compile(r"^([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)$", re.DOTALL)


def load_settings(cls: type[S], words: list[str], below: dict | None = None) -> S:
    """Settings of class `cls` from YAML paths and `a.b=value` words, in any mixture, laid over the class's
    defaults or over the whole tree `below`.

    Raises ConfigError listing every problem found.
    """
    files, dotted = split_words(words)
    layers = _Layers(_defaults(cls) if below is None else below)
    problems: list[str] = []
    for file in files:
        try:
            layers.lay_file(Path(file))
        except ConfigError as error:
            problems.append(str(error))
    return _finish(cls, layers, dotted, problems)


def apply_words(settings: S, words: list[str]) -> S:
    """The same settings with dotted words laid over them; files are not taken here."""
    files, dotted = split_words(words)
    if files:
        raise ConfigError(f"{files[0]}: only words such as model.position.window=256 can be used here")
    return _finish(type(settings), _Layers(settings.model_dump(mode="json")), dotted, [])


def asked_for(words: list[str], key: str) -> object:
    """What files and words, in their order, set a top-level key to before anything is checked; None where
    none does. For choosing the class of settings they are checked against."""
    layers = _Layers({})
    files, dotted = split_words(words)
    for file in files:
        layers.lay_file(Path(file))
    for word in dotted:
        if word.partition("=")[0].partition(".")[0] == key:
            layers.lay_word(word)
    return layers.tree.get(key)


def discarded(settings: BaseModel, words: list[str]) -> list[str]:
    """A sentence for each line of a file that a later choice of a kind has replaced, and whose setting that
    choice has too, at another value that nobody gave."""
    layers, (files, dotted) = _Layers({}), split_words(words)
    for file in files:
        layers.lay_file(Path(file))
    for word in dotted:
        layers.lay_word(word)
    told = []
    for (*place, key), value, origin in layers.dropped:
        choice = _at(settings, place)
        names = leaves(type(choice)) if isinstance(choice, BaseModel) else ()
        same = [name for name in names if name.split(".")[-1] == key]
        name = key if key in same else same[0] if len(same) == 1 else None
        if name is None or key == "name":
            continue
        *inside, last = name.split(".")
        given = _at(layers.tree, [*place, *inside])
        now = _plain(_at(choice, [*inside, last]))
        if now != value and not (isinstance(given, dict) and last in given):
            where, chosen = ".".join(place), getattr(choice, "name", "another")
            told.append(
                f"{origin}: {where}.{key} = {value} is dropped, for {chosen} was chosen after it: "
                f"{where}.{name} is {now}; give it behind that choice"
            )
    return told


def _at(settings: object, path: Sequence[str]) -> object:
    """What stands at a path below some settings; None where nothing does."""
    for key in path:
        settings = settings.get(key) if isinstance(settings, dict) else getattr(settings, key, None)
    return settings


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Command-line words sorted into YAML paths and dotted words; anything else is refused."""
    files, dotted = [], []
    for word in words:
        if _DOTTED.match(word):
            dotted.append(word)
        elif word.startswith("-"):
            raise ConfigError(f"{word}: unknown option; settings are written without dashes, as key=value")
        elif word.endswith((".yaml", ".yml")) or "/" in word or Path(word).exists():
            files.append(word)
        elif re.fullmatch(r"[\w.-]+", word):
            raise ConfigError(f"{word}: neither a YAML file nor a setting; settings are written {word}=VALUE")
        else:
            raise ConfigError(f"{word}: neither a YAML file nor a setting such as training.tokens=2M")
    return files, dotted


def _finish(cls: type[S], layers: "_Layers", dotted: list[str], problems: list[str]) -> S:
    check_reserved(cls)
    for word in dotted:
        try:
            layers.lay_word(word)
        except ConfigError as error:
            problems.append(str(error))
    tree, found = tidy(cls, layers.tree)
    for file, keys in layers.files.items():
        if len(keys) > 1 and not set(keys) & set(cls.model_fields):  # said once, not key by key
            found = [one for one in found if not layers.where(one.path).startswith(f"{file}:")]
            problems.append(
                f"{file}: none of its settings ({_listed(keys)}) is known here, where they are "
                f"{_listed(list(cls.model_fields))}: is it a file for another script?"
            )
    settings = None
    try:
        settings = cls.model_validate(tree)
    except ValidationError as error:
        found += problems_of(cls, tree, error, [problem.path for problem in found])
    problems += [f"{layers.where(problem.path)}{problem.text}" for problem in found]
    if problems:
        raise ConfigError("\n       ".join(problems))
    assert settings is not None
    return settings


def _listed(keys: list[str], most: int = 8) -> str:
    return ", ".join(keys[:most]) + (", ..." if len(keys) > most else "")


def merge(base: dict, over: dict) -> dict:
    """`over` laid upon `base`: the whole merge rule, on plain values.

    The root is no choice of a kind, so a `name` there is a key like any other.
    """
    keys = [*base, *(key for key in over if key not in base)]
    return {
        key: (_merged(base[key], over[key]) if key in base else over[key]) if key in over else base[key]
        for key in keys
    }


def _merged(base: object, over: object) -> object:
    if not isinstance(base, dict) or not isinstance(over, dict) or "name" in over:
        return over
    return merge(base, over)


class _Layers:
    """The tree so far and, for messages, where each place of it was last written (empty for a word)."""

    def __init__(self, tree: dict):
        self.tree = tree
        self.origins: dict[tuple, str] = {}
        self.dropped: list[tuple[tuple, object, str]] = []  # settings, values and lines of choices replaced
        self.files: dict[str, list[str]] = {}  # keys at the top of each file
        self._word_paths: list[tuple[tuple, str]] = []

    def where(self, path: tuple) -> str:
        """`file:line: ` of the nearest written place at or above `path`; nothing for a word."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                origin = self.origins[path[:length]]
                return f"{origin}: " if origin else ""
        return ""

    def lay_file(self, file: Path, above: tuple[Path, ...] = ()) -> None:
        """Lay a file over the tree, what it extends first."""
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
                f"{file}:{lines[('extends',)]}: extends must name a YAML file, or a list of them"
            )
        for parent in parents:
            self.lay_file(file.parent / parent, (*above, file))
        self._lay(tree, {path: f"{file}:{line}" for path, line in lines.items()})

    def lay_word(self, word: str) -> None:
        """Lay one `a.b=value` over the tree."""
        match = _DOTTED.match(word)
        assert match is not None
        path = tuple(match[1].split("."))
        value, _ = parse_yaml(match[2], word, numbered=False)
        tree: dict = {path[-1]: value}
        for key in reversed(path[:-1]):
            tree = {key: tree}
        fresh: tuple = ()
        if path[-1] == "name":
            fresh = path[:-1]
        elif isinstance(value, dict) and "name" in value:
            fresh = path
        for earlier, text in self._word_paths if fresh else ():
            if earlier[: len(fresh)] == fresh and earlier not in (fresh, (*fresh, "name")):
                raise ConfigError(
                    f"{word}: starts a fresh choice and would discard {text}; put {word} before it"
                )
        self._word_paths.append((path, word))
        self._lay(tree, {path[:length]: "" for length in range(1, len(path) + 1)})

    def _lay(self, tree: dict, origins: dict[tuple, str]) -> None:
        for path in _replaced(self.tree, tree, ()):
            before = reduce(lambda node, key: node[key], path, self.tree)
            for key, value in before.items() if isinstance(before, dict) else ():
                if origin := self.origins.get((*path, key)):
                    self.dropped.append(((*path, key), value, origin))
            self.origins = {p: o for p, o in self.origins.items() if p[: len(path)] != path}
        self.tree = merge(self.tree, tree)
        self.origins |= origins


def _replaced(base: object, over: object, path: tuple) -> list[tuple]:
    """The paths at which `over` replaces what stood in `base`."""
    if not isinstance(base, dict) or not isinstance(over, dict) or (path and "name" in over):
        return [path]
    return [found for key in over if key in base for found in _replaced(base[key], over[key], (*path, key))]


def _defaults(cls: type[BaseModel]) -> dict:
    """The class's defaults as the lowest layer, so that `position.theta=5e5` changes the default choice."""
    tree = {}
    for key, field in cls.model_fields.items():
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            tree[key] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif (group := kind_of_annotation(field.annotation).group) is not None:
            tree[key] = _defaults(group)
    return tree


def _missing(file: Path, extended_by: Path | None) -> str:
    by = f" (extended by {extended_by})" if extended_by else ""
    if file.is_dir():
        return f"{file}{by}: a folder, not a YAML file"
    folder = file.parent
    if not folder.is_dir():
        return f"{file}{by}: no such file; the folder {folder} does not exist"
    names = sorted(one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml"))
    stems = {Path(name).stem: name for name in reversed(names)}
    close = difflib.get_close_matches(file.stem, stems, n=1, cutoff=0.5)
    if close:
        return f"{file}{by}: no such file; did you mean {folder / stems[close[0]]}?"
    return f"{file}{by}: no such file; {folder} holds {', '.join(names) or 'no YAML files'}"


def dump(settings: BaseModel) -> str:
    """All settings as YAML; loading it gives equal settings."""
    return write_yaml(settings.model_dump(mode="json"))


def identity(settings: BaseModel) -> str:
    """Ten hex digits over every setting that is not `may_change`: equal settings, equal identity."""
    kept = _identifying(settings)
    text = json.dumps(kept, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _identifying(value: object) -> object:
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {
            key: _identifying(getattr(value, key))
            for key, field in fields.items()
            if not may_change(field) and not (counts_if_given(field) and getattr(value, key) in (None, []))
        }
    if isinstance(value, dict):
        return {str(key): _identifying(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_identifying(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def differences(a: BaseModel, b: BaseModel) -> list[tuple[str, object, object, bool]]:
    """(dotted name, value in a, value in b, may it change) for every setting that differs, in field order.

    Two different choices of a kind are one difference, named by the choice, with both mappings as values.
    """
    found: list[tuple[str, object, object, bool]] = []
    _differ(a, b, "", False, found)
    return found


def _differ(a: object, b: object, dotted: str, free: bool, found: list) -> None:
    if isinstance(a, BaseModel) and type(a) is type(b):
        for key, field in type(a).model_fields.items():
            name = f"{dotted}.{key}" if dotted else key
            _differ(getattr(a, key), getattr(b, key), name, free or may_change(field), found)
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            _differ(a[key], b[key], f"{dotted}.{key}", free, found)
    elif _plain(a) != _plain(b):
        found.append((dotted, _plain(a), _plain(b), free))


def _plain(value: object) -> object:
    """A plain value for comparison and display, `may_change` keys included."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
