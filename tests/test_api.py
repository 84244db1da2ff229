"""`import sextant`: load, generate, evaluate and train return plain objects."""

import pytest

import sextant
from errors import EvaluationError
from model import Transformer
from tests.training.conftest import corpus, prepared_root, settings_of_runs  # noqa: F401


@pytest.fixture(scope="module")
def overrides(settings_of_runs):  # noqa: F811
    """Settings of a run of 4 steps."""
    return [*settings_of_runs, "training.tokens=768", "training.validation.multiples=[1]"]


@pytest.fixture(scope="module")
def run(overrides, tmp_path_factory):
    return sextant.train(*overrides, run_dir=tmp_path_factory.mktemp("runs") / "run")


def test_training_returns_the_loaded_run(run, overrides):
    assert run.step == 4
    assert run.settings.train_length == 24
    assert isinstance(run.model, Transformer)
    again = sextant.load(run.folder)
    assert again.checkpoint_hash == run.checkpoint_hash
    assert not again.model.training
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
    texts = sextant.generate(
        run,
        ["ab", "cd"],
        tokens=5,
        samples=2,
        seed=3,
    )
    assert len(texts) == 4
    assert all(isinstance(text, str) for text in texts)
    assert sextant.generate(run.folder, "cd", tokens=5, seed=4) == texts[3:]
    assert sextant.generate(run, "ab", tokens=5, temperature=0) == sextant.generate(
        run, "ab", tokens=5, top_k=1
    )


def test_evaluation_is_a_table_with_figures(run):
    results = sextant.evaluate(
        run,
        "documents=6",
        lengths=[24, 48],
        targets=8,
        methods=["trained"],
    )
    assert results.folder == run.folder / "evaluation" / "python"
    lengths = [row["length"] for row in results.rows if row["metric"] == "nll"]
    assert lengths == [24, 48]
    assert results.figures
    assert all(file.stat().st_size for file in results.figures)
    assert "48" in results.text
    pandas = pytest.importorskip("pandas")
    assert isinstance(results.to_pandas(), pandas.DataFrame)


def test_a_run_loaded_with_an_override_is_not_evaluated_as_trained(run):
    loaded = sextant.load(run.folder, "model.position.theta=500")
    with pytest.raises(EvaluationError, match="methods"):
        sextant.evaluate(loaded, "documents=6", lengths=[24], targets=8, methods=["trained"])
