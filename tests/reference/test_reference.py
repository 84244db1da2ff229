"""The script that compares a tree with a stored reference reports every difference."""

import json
from pathlib import Path

import numpy as np
import pytest

from model import ModelSettings, Transformer
from tests.model.zoo import CASES
from tests.reference.model_values import case_values
from tests.reference.reference import differences, json_values

STORED = json.loads(Path(__file__).with_name("model_cases.json").read_text(encoding="utf-8"))


def test_stored_cases_are_those_of_the_conformance_suite():
    """Schemes that are newer than the stored values have none."""
    stored = {name: case["position"] for name, case in STORED["cases"].items() if name in CASES}
    assert stored == {name: CASES[name] for name in stored}
    assert len(stored) >= 139


def test_a_model_equals_itself_and_differs_by_one_weight():
    def values(name):
        settings = ModelSettings(**STORED["sizes"], **STORED["cases"][name])
        model = Transformer(settings, STORED["vocab_size"], STORED["train_length"])
        return {key: value.detach().numpy() for key, value in case_values(model).items()}

    expected = values("alibi")
    assert differences("models", expected, values("alibi")) == []
    assert np.ptp(expected["loss"]) == 0 and np.abs(expected["gradient/head.weight"]).max() > 1e-3
    changed = values("alibi-learned")
    assert {"loss", "logits/plain"} <= {
        line.split(":")[0] for line in differences("models", expected, changed)
    }


@pytest.mark.parametrize(
    ("group", "after", "lines"),
    [
        ("models", 1 + 1e-13, 0),
        ("models", 1 + 1e-11, 1),
        ("evaluations", 1 + 1e-13, 1),
        ("evaluations", np.nan, 1),
    ],
)
def test_tolerance(group, after, lines):
    assert len(differences(group, {"a": np.array(1.0)}, {"a": np.array(after)})) == lines


def test_leaves_of_json():
    stored = {"a": [{"b": 1}, {"b": 2}], "seconds": 3, "c": [1, 2]}
    values = json_values(stored, "x")
    assert {key: str(value) for key, value in values.items()} == {
        "x/a/0/b": "1",
        "x/a/1/b": "2",
        "x/c": "[1, 2]",
    }
    assert differences("runs", values, {"x/a/0/b": values["x/a/1/b"], "y": values["x/c"]}) == [
        "x/a/0/b: 1 of 1: '1' is now '2'",
        "x/a/1/b: missing",
        "x/c: missing",
        "y: new",
    ]
