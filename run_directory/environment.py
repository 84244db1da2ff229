"""The environment of an attempt, for the manifest: command, commit, versions and hardware."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

_LIBRARIES = (
    "torch",
    "accelerate",
    "datasets",
    "numpy",
    "pydantic",
    "safetensors",
    "sentencepiece",
    "tokenizers",
)
_DRIVER = "/proc/driver/nvidia/version"


def attempt(
    command: Sequence[str],
    changes: list[str],
    processes: dict | None,
) -> dict:
    """One entry of the manifest's `attempts`; `processes` describes those that share the run."""
    commit, dirty = _commit()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "commit": commit,
        "uncommitted_changes": dirty,
        "changed_settings": changes,
        "versions": {"python": platform.python_version()} | _versions(),
        "machine": _machine(),
        "parallel": processes,
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    driver = _search(r"(\d+\.\d+(?:\.\d+)?)", _DRIVER)
    return versions | {"cuda": torch.version.cuda, "driver": driver}


def _machine() -> dict:
    """The hardware of the main process; memory in bytes."""
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [card.name for card in cards],
        "gpu_memory": [card.total_memory for card in cards],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def processor() -> str:
    """The model of the CPU, or its architecture where the system does not name it."""
    named = _search(r"^model name\s*:\s*(.*)$", "/proc/cpuinfo")
    return named or platform.processor() or platform.machine()


def _search(pattern: str, file: str) -> str | None:
    """The first group of a pattern in a system file; None where there is none."""
    try:
        match = re.search(
            pattern,
            Path(file).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    except OSError:
        return None
    return match[1] if match else None


def _commit() -> tuple[str | None, bool | None]:
    """The commit of this code, and whether files differ from it; (None, None) without a
    repository."""
    home = Path(__file__).resolve().parents[1]
    if not (home / ".git").exists() or shutil.which("git") is None:
        return None, None

    def git(*arguments: str) -> str | None:
        done = subprocess.run(
            ["git", "-C", str(home), *arguments],
            capture_output=True,
            text=True,
        )
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)
