"""Short names that tell several runs apart."""

import re
from collections.abc import Sequence
from pathlib import Path

from errors import ConfigError

_HASH = re.compile(r"-[0-9a-f]{10}$")  # at the end of a run directory's name


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
