"""Permuting positions raises the loss of models that use them, and of no other."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model import ModelSettings, Transformer
from scripts.checks import probe_positions


@pytest.mark.parametrize(("name", "reads"), [("learned", True), ("none", False)])
def test_loss_changes_only_if_positions_are_used(name, reads, monkeypatch):
    settings = ModelSettings(dim=24, layers=2, heads=2, position={"name": name})
    model = Transformer(settings, 17, 8).initialize(5)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 17, (6, 9)))
    monkeypatch.setattr(probe_positions, "held_out", lambda run, rng: tokens)
    if reads:
        (table,) = model.position.parameters()
        table.data.mul_(50)
    about = SimpleNamespace(model=settings, train_length=8, original_length=None, seed=5)
    run = SimpleNamespace(model=model, settings=about, folder=SimpleNamespace(name="run"))
    row = probe_positions.probe(run)
    assert row["schemes"] == name and row["unchanged"] == "" and row["nll"] > 0
    assert (row["parameters"] > 0) is reads
    if reads:
        assert row["permuted_low"] < row["permuted"] and row["permuted"] != 0
        model.initialize(5)
        assert probe_positions.probe(run)["unchanged"]
    else:
        assert row["permuted"] is None and row["permuted_low"] is None
