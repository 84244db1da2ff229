"""What scoring leaves to others: failures, the model's mode, units and the unigram baseline."""

import numpy as np
import pytest
import torch

from evaluation.scoring.scoring import CellFailed, ModelScorer, batches, measure, unigram_nll
from evaluation.scoring.targets import draw_targets
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import fixed_windows
from model import TokenPositions


@pytest.fixture
def work(make_store):
    text = EvaluationText(make_store([120, 133, 90, 101]))
    targets = draw_targets(text, tokenizer_hash="t", longest=64, span=7, spans_per_document=3)
    return text, targets


def test_a_non_finite_target_fails_the_cell_and_is_never_dropped(work):
    text, targets = work
    windows = fixed_windows(targets, 32)

    def broken(tokens, keep):
        out = np.ones((len(tokens), keep))
        out[-1, 2] = np.nan if len(tokens) == 5 else np.inf
        return out

    for batch in (5, 4):
        with pytest.raises(CellFailed, match=r"length 32, document doc\d"):
            measure(broken, text, windows, batches(windows, batch))


def test_scoring_restores_training_mode_and_gradients(work, sharp):
    text, targets = work
    model = sharp().train()
    windows = fixed_windows(targets, 64)
    measure(ModelScorer(model), text, windows, batches(windows, 1))
    assert model.training
    # Tables that grew during the evaluation serve a training step afterwards.
    tokens = torch.randint(3, 23, (2, 65))
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
