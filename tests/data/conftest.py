"""A small corpus of words drawn with a fixed seed, and a console that records its output."""

import random
from contextlib import contextmanager
from pathlib import Path

import pytest

from data import DataSettings

_WORDS = """
position window token model order document length scheme table cache query value rotate angle shard
batch epoch train valid space number line reader return import class def while yield lambda
"""
WORDS = _WORDS.split()


class Listener:
    """A console that records its output."""

    def __init__(self):
        self.lines: list[str] = []
        self.tables: list[list] = []

    def info(self, text):
        self.lines.append(text)

    warn = info

    @contextmanager
    def bar(self, label, total, unit="it"):
        yield self

    def advance(self, n=1):
        pass

    def table(self, title, columns, rows):
        self.tables.append(rows)


def changed(settings: DataSettings, **values) -> DataSettings:
    return DataSettings.model_validate({**settings.model_dump(), **values})


def make_text(rng: random.Random, words: int) -> str:
    out = []
    for _ in range(words):
        out.append(rng.choice(WORDS) + rng.choice(["", "", "s", "ed", str(rng.randrange(100))]))
        out.append(rng.choice([" ", " ", " ", "\n    ", "\n\t", ", "]))
    return "".join(out) + "\n"


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch):
    """Waiting for the disk is most of the time of a small preparation."""
    monkeypatch.setattr("data.files.os.fsync", lambda handle: None)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """37 text files of 20 to 800 words, in two folders."""
    rng = random.Random(5)
    folder = tmp_path / "corpus"
    for i in range(37):
        path = folder / f"part{i % 2}" / f"{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make_text(rng, rng.randrange(20, 800)))
    return folder


@pytest.fixture
def settings(corpus: Path, tmp_path: Path) -> DataSettings:
    """Preparation of `corpus` into many small shards."""
    return DataSettings(
        source={"name": "files", "path": str(corpus)},
        tokenizer={"name": "sentencepiece", "vocab_size": 400},
        valid_fraction=0.2,
        shard_bytes=18_000,
        root=str(tmp_path / "prepared"),
    )
