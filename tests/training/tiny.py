"""Tiny trainings: train.py in this process, and what they leave."""

import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

import train
from run_directory.checkpoints import find_checkpoint, folder_of, steps_of
from run_directory.metrics_file import read_metrics

TIMING = {"attempt", "tokens_per_second", "mfu", "peak_memory_bytes", "seconds"}
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def trained(*words: object) -> int:
    """The exit status of train.py in this process: imports are paid once."""
    return train.main([str(word) for word in words])


def lines(folder: Path, kind: str | None = None) -> list[dict]:
    """The metrics of a run without what a clock decides."""
    kept = read_metrics(folder / "metrics.jsonl", kind)
    untimed = [{k: v for k, v in line.items() if k not in TIMING} for line in kept]
    return [line for line in untimed if line["kind"] != "start"]


def logged_steps(folder: Path) -> int:
    """The training steps in metrics.jsonl, which may be under way."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b'"kind": "train"') if file.exists() else 0


def weights(folder: Path, step: int | None = None, kind: str = "model") -> dict[str, Tensor]:
    checkpoint = find_checkpoint(folder, step)
    assert checkpoint is not None
    return load_file(checkpoint.folder / f"{kind}.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def cut(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, as an interrupted run lacks them."""
    for later in [other for other in steps_of(folder) if other > step]:
        shutil.rmtree(folder_of(folder, later))


def files_of(folder: Path, step: int) -> list[bytes]:
    return [(folder_of(folder, step) / name).read_bytes() for name in FILES]
