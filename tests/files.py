"""Files that tests read: the tables of their cases, and results."""

import json
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def table(name: str) -> Any:
    """The content of a YAML file, by its path in tests/."""
    return yaml.safe_load((TESTS / name).read_text(encoding="utf-8"))


def results_of(folder: Path) -> dict:
    """results.json of an evaluation or a study."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))
