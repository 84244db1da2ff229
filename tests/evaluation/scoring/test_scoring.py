"""What scoring leaves to others: failures, the model's mode, units and the unigram baseline."""

import re

import numpy as np
import pytest
import torch

from evaluation.scoring.text_loss import ModelScorer, unigram_nll
from model import TokenPositions


@pytest.mark.parametrize("batch", [5, 4])
def test_a_non_finite_target_fails_the_cell_and_is_never_dropped(do, monkeypatch, batch):
    def broken(tokens, keep):
        out = np.ones((len(tokens), keep))
        if tokens.shape[1] == 33:
            out[-1, 2] = np.nan if batch == 5 else np.inf
        return out

    monkeypatch.setattr("evaluation.scoring.text_loss.ModelScorer", lambda *_, **__: broken)
    result = do(methods=["trained"], batch=batch)
    assert result.nll.keys() == {("trained", 16), ("trained", 64)}
    ((where, reason),) = result.failed.items()
    assert where == ("trained", 32)
    assert re.search(r"length 32, document doc\d", reason)


def test_scoring_restores_training_mode_and_gradients(sharp):
    model = sharp().train()
    tokens = torch.randint(3, 23, (2, 65))
    ModelScorer(model)(tokens.numpy(), 7)
    assert model.training
    # Tables that grew during the evaluation serve a training step afterwards.
    model(tokens[:, :-1], TokenPositions.plain(64), targets=tokens[:, 1:]).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_unigram_by_hand(make_store):
    store = make_store([6], seed=4)
    store.documents = [np.array([1, 5, 5, 7, 2], dtype=np.uint16)]
    store.lengths = np.array([5])
    got = unigram_nll(store, np.array([5, 7, 3]), 23)
    assert np.exp(-got) == pytest.approx([3 / 26, 2 / 26, 1 / 26])
    everything = np.exp(-unigram_nll(store, np.arange(23), 23))
    assert everything.sum() == pytest.approx(1)
