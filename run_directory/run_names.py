"""The default name of a run directory, and short names that tell several runs apart."""

import re
from collections.abc import Sequence
from pathlib import Path

from errors import ConfigError
from run_directory.run_settings import RunSettings
from settings.load import (
    identity,
    split_arguments,
)

_HASH = re.compile(r"-[0-9a-f]{10}$")  # at the end of a run directory's name


def run_folder(
    settings: RunSettings,
    arguments: Sequence[str],
    root: str | Path = "runs",
) -> Path:
    """The default run directory: `<root>/<first file>-<scheme>-<identity>`, such as
    runs/tiny-alibi-0123456789."""
    names = [name_stem(arguments), *scheme_names(settings), identity(settings)]
    return Path(root) / "-".join(dict.fromkeys(names))


def scheme_names(settings: RunSettings) -> list[str]:
    """The names of the positional schemes of a run, and of their scaling: rope, yarn."""
    names = []
    for kind in settings.model.resolved_kinds.values():
        names.append(kind.position.name)
        scaling = getattr(kind.position, "scaling", None)
        if scaling is not None and scaling.name != "none":
            names.append(scaling.name)
    return names


def name_stem(arguments: Sequence[str]) -> str:
    """The first part of a run's name: its first YAML file, else the parent of a fork, else
    `default`."""
    files, overrides = split_arguments(list(arguments))
    values = dict(override.split("=", 1) for override in overrides)
    forked = values.get("parent.run") if "parent.fork" in values else None
    return Path(files[0]).stem if files else Path(forked or "default").name


def names_of(folders: Sequence[Path]) -> list[str]:
    """The shortest unique endings of the paths, without the hash of the settings if possible."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ConfigError("duplicate run: name each run once")
    for n in range(1, max(map(len, parts))):
        endings = ["/".join(part[-n:]) for part in parts]
        for names in ([_HASH.sub("", ending) for ending in endings], endings):
            if len(set(names)) == len(names):
                return names
    return [str(folder) for folder in folders]
