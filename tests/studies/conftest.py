"""A tiny corpus and a study of tiny models on it."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import rc_context

from evaluation.reports.charts import STYLE
from studies.report import figures

ROOT = Path(__file__).resolve().parents[2]

BASE = """
train_length: 24
model: {{dim: 24, layers: 2, heads: 6, kv_heads: 2, ffn_dim: 40}}
data:
  source: {{name: files, path: {corpus}}}
  tokenizer: {{name: bytes}}
  valid_fraction: 0.3
  root: {root}
training:
  tokens: {tokens}
  batch_size: 8
  log_interval: 4
  checkpoint: {{interval: 3, keep: 1}}
  validation: {{interval: null, multiples: [1], spans: 4, targets: 8}}
  samples: {{prompts: ["a"], tokens: 4}}
"""

STUDY = """
base: [{base}]
grid:
  scheme:
    rope: [{configs}/position/rope.yaml]
    learned: [{configs}/position/learned.yaml]
  seed: [0, 1]
variants:
  rope + yarn: {{scheme: rope, method: yarn}}
evaluations:
  held-out: {{overrides: ["lengths=[24,48]", targets=8, spans_per_document=2, device=cpu]}}
report: {{baseline: rope, primary: held-out}}
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """40 documents of some hundred made-up letters."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(7)
    for i in range(40):
        letters = "".join(rng.choices("abcdefgh ", k=rng.randint(150, 500)))
        (folder / f"{i:02}.txt").write_text(letters, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prepared_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="session")
def write_study(corpus, prepared_root, tmp_path_factory):
    """Write a study file and its base: equal texts, equal paths. Returns the path of the study file."""
    home = tmp_path_factory.mktemp("files")

    def write(text: str = STUDY, tokens: int = 1152) -> Path:
        base = home / f"base-{tokens}.yaml"
        base.write_text(
            BASE.format(corpus=corpus, root=prepared_root, tokens=tokens), encoding="utf-8"
        )
        filled = text.format(base=base, configs=ROOT / "configs", corpus=corpus)
        file = home / hashlib.sha256(filled.encode()).hexdigest()[:8] / "tiny.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(filled, encoding="utf-8")
        return file

    return write


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "study.py"), *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """study.py in a process of its own."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def blank_figures(monkeypatch):
    """Figures are built but not rendered: for tests of the text around them."""

    def save(figure, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in (".png", ".svg"):
            (folder / f"{name}{suffix}").write_text(
                '<svg viewBox="0 0 1 1"></svg>', encoding="utf-8"
            )
        return folder / f"{name}.png"

    monkeypatch.setattr(figures, "save", save)


@pytest.fixture(scope="module")
def vector_figures():
    """Figures are rendered as SVG only, which takes half the time: for tests of the page."""

    def save(figure, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").touch()
        with rc_context(STYLE):
            figure.savefig(
                folder / f"{name}.svg", format="svg", facecolor="white", metadata={"Date": None}
            )
        return folder / f"{name}.png"

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(figures, "save", save)
        yield
