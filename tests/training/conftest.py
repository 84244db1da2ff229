"""A tiny corpus, the command line of a tiny run, and tiny runs that several files read."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.files import ROOT, table
from tests.training.tiny import trained

REFUSED = table("training/refused.yaml")


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
def overrides(settings_of_runs) -> list[str]:
    """Settings of a run of 12 steps that takes a second."""
    return list(settings_of_runs)


@pytest.fixture(scope="session")
def settings_of_runs(corpus, prepared_root) -> list[str]:
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


@pytest.fixture(scope="session")
def whole(settings_of_runs, tmp_path_factory) -> Path:
    """An uninterrupted tiny run. Read it; do not write into it."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert trained(*settings_of_runs, "--run-dir", folder) == 0
    return folder


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


def run(*words: str, cwd: Path, prefix: list[str], **more: str) -> subprocess.CompletedProcess:
    """A run of train.py in processes that a launcher (`prefix`) starts."""
    return subprocess.run(
        [*prefix, str(ROOT / "train.py"), *words],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
