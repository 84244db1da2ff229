"""A tiny corpus and a study of tiny models on it."""

import hashlib
from pathlib import Path

import pytest

from evaluation.reports import report
from tests.files import ROOT
from tests.training.conftest import corpus, prepared_root  # noqa: F401

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
  checkpoint: {{interval: 3, keep: 2}}
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
def write_study(corpus, prepared_root, tmp_path_factory):  # noqa: F811
    """Write a study file and its base: equal texts, equal paths. Returns the path of the study
    file."""
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


@pytest.fixture
def figures(monkeypatch) -> dict:
    """The figures that are drawn, by name; they are not rendered."""
    drawn = {}

    def save(figure, folder: Path, name: str) -> Path:
        drawn[name] = figure
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text("<svg></svg>", encoding="utf-8")
        return folder / f"{name}.png"

    monkeypatch.setattr(report, "save", save)
    return drawn
