"""From a study file to cells: what is expanded, left out, and rejected."""

import itertools
import json

import pytest
import yaml

from data.tokenizers import ByteTokenizer
from errors import ConfigError, StudyError
from model import Transformer
from run_directory.checkpoints import save_checkpoint, save_weights
from run_directory.parent_run import open_parent
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from run_directory.weights import weights_of
from settings.load import dump, load_settings
from studies.planned_cells import StudyPlanner
from studies.study_settings import StudySettings, cells_of, running_order
from tests.files import table

REFUSED = table("studies/refused.yaml")
TEXT = """
base: [base.yaml, training.tokens=1M]
grid:
  scheme: {rope: [a.yaml, model.position.theta=500], none: b.yaml, plain: }
  seed: [9, 10]
  train_length: {short: [train_length=64], long: train_length=128}
"""


@pytest.fixture
def load(tmp_path):
    def read(text: str = TEXT, *overrides: str) -> StudySettings:
        file = tmp_path / "study.yaml"
        file.write_text(text, encoding="utf-8")
        return load_settings(StudySettings, [str(file), *overrides])

    return read


def test_every_combination_is_a_cell_in_the_order_of_the_axes(load):
    cells = cells_of(load())
    expected = itertools.product(["rope", "none", "plain"], ["9", "10"], ["short", "long"])
    assert [cell.id for cell in cells] == [
        f"scheme={a},seed={b},train_length={c}" for a, b, c in expected
    ]
    both = ("base.yaml", "training.tokens=1M")
    rope = ("a.yaml", "model.position.theta=500")
    assert cells[0].arguments == (*both, *rope, "seed=9", "train_length=64")
    assert cells[7].arguments == (*both, "b.yaml", "seed=10", "train_length=128")
    assert cells[8].arguments == (*both, "seed=9", "train_length=64")  # a label without overrides


def test_listed_values_are_their_own_labels(load):
    cells = cells_of(load("grid: {training.tokens: [1M, 2_000], training.grad_clip: [null]}"))
    assert [cell.arguments for cell in cells] == [
        ("training.tokens=1M", "training.grad_clip=null"),
        ("training.tokens=2000", "training.grad_clip=null"),
    ]


def test_skip_excludes_cells_that_match_on_all_axes(load):
    skip = "\nskip: [{scheme: [rope, none], seed: 10}, {scheme: plain, train_length: [long]}]"
    expected = set()
    for cell in cells_of(load()):
        is_plain = cell.axes["scheme"] == "plain"
        if "long" not in cell.id if is_plain else "seed=10" not in cell.id:
            expected.add(cell.id)
    assert {cell.id for cell in cells_of(load(TEXT + skip))} == expected
    with pytest.raises(StudyError, match="skip"):
        cells_of(load(TEXT + "\nskip: [{seed: [9, 10]}]"))


def test_cells_of_the_first_rung_and_seed_run_first(load):
    study = load()
    order = [cell.axes["seed"] for cell in running_order(cells_of(study), study)]
    assert order == ["9"] * 6 + ["10"] * 6
    value = "{scheme: rope, length: 4x}"
    effect = f"{{statement: rope, value: {value}, delta: 0.1, expect: grows}}"
    trend = f"trend={{axis: train_length, effects: {{rises: {effect}}}}}"
    study = load(TEXT + "\nevaluations: {loss: {}}", trend)
    order = [
        (c.axes["train_length"], c.axes["seed"]) for c in running_order(cells_of(study), study)
    ]
    blocks = [("short", "9"), ("short", "10"), ("long", "9"), ("long", "10")]
    assert order == [block for block in blocks for _ in range(3)]  # one rung after the other


def test_dumped_settings_load_equal(load, tmp_path):
    study = load(
        TEXT + "\nskip: [{scheme: rope, seed: 10}]\nvariants: {x: {scheme: rope, method: yarn}}"
    )
    (tmp_path / "again.yaml").write_text(dump(study), encoding="utf-8")
    assert load_settings(StudySettings, [str(tmp_path / "again.yaml")]) == study


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=str)
def test_invalid_study_files_are_rejected(load, content, message):
    with pytest.raises(ConfigError, match=message):
        load(yaml.safe_dump(content))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{rank: 8, length: 4x, from: 1x}", "length 4x"),
        ("{rank: 8, length: 2x, method: yarn}", "method yarn"),
        ("{rank: 8, length: 2x, evaluation: more}", "no evaluation more"),
        ("{rank: 8, length: 2x, from: 1x}", None),
    ],
)
def test_effects_that_no_evaluation_measures_are_rejected(load, tmp_path, corpus, value, problem):
    text = """
    grid: {rung: {small: [train_length=16], large: [train_length=32]}, seed: [0], rank: {8: []}}
    evaluations:
      loss: {overrides: ["lengths=[2x]", "methods=[trained]"]}
      more: {skip: [{rung: small}]}
    trend: {effects: {rise: {statement: s, delta: 0.1, expect: grows, value: %s}}}
    """
    study = load(text % value)
    source = f'data.source={{name: files, path: "{corpus}"}}'
    base = [source, "data.tokenizer={name: bytes}", "training.validation.targets=8"]
    study = study.model_copy(update={"base": base})
    planner = StudyPlanner(study, tmp_path / "study")
    if problem is None:
        assert len(planner.plan(cells_of(study))) == 2
        return
    with pytest.raises(StudyError, match=f"rung=small.*trend.effects.rise.*{problem}"):
        planner.plan(cells_of(study))


def test_cells_that_extend_a_parent_have_its_settings(load, tmp_path, corpus):
    """Its shape, tokenizer and checkpoint, so that a second start recognizes a finished cell."""
    parent = tmp_path / "parent"
    source = f'data.source={{name: files, path: "{corpus}"}}'
    shape = {"dim": 24, "layers": 2, "heads": 6, "kv_heads": 2, "ffn_dim": 40}
    settings = RunSettings(
        train_length=24,
        model=shape,
        data={"tokenizer": {"name": "bytes"}},
        training={"validation": {"targets": 8}},
    )
    Run.create(parent, settings, ByteTokenizer(), ["test"])
    save_weights(parent, 0, Transformer(settings.model, 258, 24).initialize(0))
    study = load("grid: {scheme: {linear: [model.position.scaling.name=linear]}}")
    study = study.model_copy(update={"base": [f"parent.run={parent}", "train_length=48", source]})
    (plan,) = StudyPlanner(study, tmp_path / "study").plan(cells_of(study))
    found = plan.settings
    assert (found.model.dim, found.original_length, found.seed) == (24, 24, 1)
    assert plan.settings.parent.hash == open_parent(parent).checkpoint.hash
    Run.create(plan.run, plan.settings, ByteTokenizer(), ["test"])
    assert StudyPlanner(study, tmp_path / "study").plan(cells_of(study)) == [plan]


@pytest.mark.parametrize("weights", ["null", "ema", "last"])
def test_results_of_the_selected_weights_and_methods_are_recognized(
    load, tmp_path, corpus, weights
):
    chosen = f"{{held-out: {{overrides: [weights={weights}]}}}}"
    study = load(f"grid: {{seed: [1]}}\nevaluations: {chosen}")
    source = f'data.source={{name: files, path: "{corpus}"}}'
    base = [source, "data.tokenizer={name: bytes}", "training.ema={}", "model={dim: 24, heads: 2}"]
    study = study.model_copy(update={"base": base})
    (cell,) = StudyPlanner(study, tmp_path).plan(cells_of(study))
    (evaluation,) = cell.evaluations
    run = Run.create(cell.run, cell.settings, ByteTokenizer(), ["test"])
    model = Transformer(cell.settings.model, 258, cell.settings.train_length).initialize(0)
    tensors = dict.fromkeys(("model", "average"), weights_of(model))
    checkpoint = save_checkpoint(cell.run, cell.settings.steps, tensors)
    folder = cell.run / "evaluation" / "held-out"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(dump(evaluation.settings))
    window = cell.settings.train_length  # of the built-in method
    for measured, size in itertools.product(("ema", "last"), (window, window - 1)):
        record = {"checkpoint_hash": run.load(weights=measured).checkpoint_hash}
        record["methods"] = {"window": {"overrides": [f"model.position.window={size}"]}}
        (folder / "results.json").write_text(json.dumps(record))
        is_selected = (weights == "last") == (measured == "last") and size == window
        assert (cell.results(evaluation, checkpoint) == record) == is_selected
