"""`import sextant`: load, generate, evaluate and train return plain objects."""

import random

import pytest

import sextant
from model import Transformer


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """Settings of a run of 4 steps on 30 documents."""
    home = tmp_path_factory.mktemp("api")
    rng = random.Random(3)
    (home / "text").mkdir()
    for i in range(30):
        text = "".join(rng.choices("abcdefgh ", k=200 + 10 * i))
        (home / "text" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return [
        "train_length=24", "model.dim=24", "model.layers=1", "model.heads=2", "data.source.name=files",
        f"data.source.path={home / 'text'}", "data.tokenizer.name=bytes", "data.valid_fraction=0.4",
        f"data.root={home / 'prepared'}", "training.tokens=384", "training.batch_size=4",
        "training.validation={targets: 8, spans: 2, multiples: [1]}", "training.samples.tokens=4",
        "training.precision=float32",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(overrides, tmp_path_factory):
    return sextant.train(*overrides, run_dir=tmp_path_factory.mktemp("runs") / "run")


def test_training_returns_the_loaded_run(run, overrides):
    assert run.step == 4 and run.settings.train_length == 24 and isinstance(run.model, Transformer)
    again = sextant.load(run.folder)
    assert again.checkpoint_hash == run.checkpoint_hash and not again.model.training
    assert sextant.train(*overrides, run_dir=run.folder).step == 4  # nothing left to do


def test_training_chooses_the_run_directory_of_the_command(run, overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = sextant.train(*overrides)
    assert trained.folder.resolve().is_relative_to(tmp_path / "runs")
    assert trained.checkpoint_hash == run.checkpoint_hash


def test_loading_with_an_override(run):
    loaded = sextant.load(run.folder, "model.position.theta=500")
    assert loaded.settings.model.position.theta == 500


def test_generation_depends_on_prompt_and_seed_only(run):
    texts = sextant.generate(run, ["ab", "cd"], tokens=5, samples=2, seed=3)
    assert len(texts) == 4 and all(isinstance(text, str) for text in texts)
    assert sextant.generate(run.folder, "cd", tokens=5, seed=4) == texts[3:]
    assert sextant.generate(run, "ab", tokens=5, temperature=0) == sextant.generate(
        run, "ab", tokens=5, top_k=1
    )


def test_evaluation_is_a_table_with_figures(run):
    results = sextant.evaluate(run, "documents=6", lengths=[24, 48], targets=8, methods=["trained"])
    assert results.folder == run.folder / "evaluation" / "python"
    lengths = [row["length"] for row in results.rows if row["metric"] == "nll"]
    assert lengths == [24, 48] and all(isinstance(length, int) for length in lengths)
    assert results.figures and all(file.stat().st_size for file in results.figures)
    assert "48" in results.text
    pandas = pytest.importorskip("pandas")
    assert isinstance(results.to_pandas(), pandas.DataFrame)
