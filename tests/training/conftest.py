"""A tiny corpus and the command line of a tiny run."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training.hardware import peak_flops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """60 documents of a few hundred bytes of made-up words: enough to train a few steps on."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(7)
    overrides = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    for i in range(60):
        text = " ".join(rng.choices(overrides, k=rng.randint(40, 160)))
        (folder / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prepared_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def overrides(corpus, prepared_root) -> list[str]:
    """Settings of a run of 12 steps that takes a second."""
    return [
        "train_length=24",
        "model.dim=32",
        "model.layers=2",
        "model.heads=4",
        "model.kv_heads=2",
        "data.source.name=files",
        f"data.source.path={corpus}",
        "data.tokenizer.name=bytes",
        "data.valid_fraction=0.2",
        f"data.root={prepared_root}",
        "training.precision=float32",
        "training.batch_size=8",
        "training.tokens=2304",
        "training.log_interval=4",
        "training.checkpoint.interval=3",
        "training.validation.interval=4",
        "training.validation.spans=4",
        "training.validation.targets=8",
        "training.samples.tokens=8",
    ]


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *overrides]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


def run(
    *overrides: str, cwd: Path, prefix: list[str] | None = None, **more: str
) -> subprocess.CompletedProcess:
    """A run of train.py in a process of its own; `prefix` replaces the interpreter (a launcher)."""
    line = [*prefix, str(ROOT / "train.py"), *overrides] if prefix else command(*overrides)
    return subprocess.run(
        line,
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="session", autouse=True)
def measured_machine():
    """The peak rate is measured before any fork, so that forks do not measure it again."""
    peak_flops(torch.device("cpu"))
