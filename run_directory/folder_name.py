"""The default name of a run directory."""

from collections.abc import Sequence
from glob import escape
from pathlib import Path

from errors import ConfigError
from run_directory.run import is_run
from run_directory.run_settings import RunSettings
from settings.load import differences, identity, load_settings, split_arguments


def run_folder(
    settings: RunSettings,
    arguments: Sequence[str],
    root: str | Path = "runs",
) -> Path:
    """The default run directory: `<root>/<first file>-<choices not in that file>-<identity>`, such
    as runs/tiny-alibi-0123456789. Other overrides with equal settings give the same folder."""
    stem = name_stem(arguments)
    end = identity(settings)
    folders = sorted(Path(root).glob(f"{escape(stem)}-*{end}"))
    existing = next((folder for folder in folders if is_run(folder)), None)
    names = dict.fromkeys([stem, *choices_of(settings, arguments), end])
    return existing or Path(root) / "-".join(names)


def choices_of(settings: RunSettings, arguments: Sequence[str]) -> list[str]:
    """The names of choices, the scheme's first, that the first YAML file of a run does not make
    itself; [] for a fork without a file, which takes its parent's name."""
    files, _ = split_arguments(list(arguments))
    if not files and settings.is_fork:
        return []
    try:
        base = load_settings(RunSettings, files[:1])
    except ConfigError:  # a file that needs other files to be valid
        base = RunSettings()
    named = [
        (key, new["name"])
        for key, _, new, may_change in differences(base, settings)
        if not may_change and isinstance(new, dict) and "name" in new
    ]
    named.sort(key=lambda choice: not choice[0].startswith("model.position"))
    return [name for _, name in named]


def name_stem(arguments: Sequence[str]) -> str:
    """The first part of a run's name: its first YAML file, else the parent of a fork, else
    `default`."""
    files, overrides = split_arguments(list(arguments))
    values = dict(override.split("=", 1) for override in overrides)
    forked = values.get("parent.run") if "parent.fork" in values else None
    return Path(files[0]).stem if files else Path(forked or "default").name
