"""Cells of a study are comparable: equal initial weights and equal data, both recorded."""

import pytest

from model import Transformer
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from studies.study_results_reader import read_study
from tests.files import ROOT

SCHEMES = [
    "none",
    "alibi",
    "kerple",
    "t5",
    "fire",
    "sinusoidal",
    "learned",
    "nope_every_4th",
    "fox",
]


def initial_weights(label: str, seed: int) -> dict:
    file = str(ROOT / "configs" / "position" / f"{label}.yaml")
    small = ["model.dim=32", "model.heads=4", "model.layers=4"]
    settings = load_settings(RunSettings, [file, *small])
    model = Transformer(settings.model, 71, settings.train_length).initialize(seed)
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("label", SCHEMES)
def test_schemes_of_a_seed_start_from_the_same_weights(label):
    """All weights but those that positions learn, and they depend on the seed."""
    ours = initial_weights(label, 3)
    theirs = initial_weights("rope", 3)
    other = initial_weights("rope", 4)
    assert theirs.keys() <= ours.keys()  # rotary positions learn nothing
    assert all("position" in name for name in ours.keys() - theirs.keys())
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert sum(not ours[name].equal(other[name]) for name in theirs) >= 4 * 7  # the matrices


def unfair(*cells: dict) -> list[str]:
    study = {"variants": {}, "evaluations": {}, "report": {}}
    return read_study({"format": 1, "name": "x", "study": study, "cells": [*cells]}).unfair


def entry(scheme: str, order: str, tokens: int = 100, seed: int = 0, **axes: str) -> dict:
    shared = {"train_length": 8, "batch_size": 2, "data_hash": "d"}
    training = {"data_order": order, "tokens": tokens, "seed": seed, **shared}
    axes = {"scheme": scheme, "seed": str(seed), **axes}
    return {"id": scheme, "axes": axes, "training": training, "evaluations": {}}


def test_different_batches_and_unequal_tokens_are_reported():
    fair = [entry("a", "x"), entry("b", "x"), entry("c", "y", seed=1)]
    assert unfair(*fair, entry("e", "") | {"training": None}) == []
    (line,) = unfair(*fair, entry("d", "z"))
    assert "seed 0" in line
    assert "a, b; d" in line
    (line,) = unfair(*fair, entry("d", "x", tokens=200))
    assert "numbers of tokens" in line
    assert unfair(entry("a", "x", size="s"), entry("a", "z", tokens=200, size="m")) == []
