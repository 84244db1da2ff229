"""Evaluation text of a run: held-out documents, and training text where asked for."""

import numpy as np
import pytest

from evaluation.scoring.scoring import unigram_nll
from evaluation.scoring.text import EvaluationText


@pytest.mark.parametrize(
    ("trained", "seen"),
    [
        (["bob"], [False, True, False]),
        (["own"], [True, True, True]),
        (["plain"], None),  # it names no clusters
        (["eve", "bob"], [False, True, False]),
        (["bob", "eve"], [False, True, False]),  # whichever training came first
        (["bob", "own"], [True, True, True]),
    ],
)
def test_units_seen_in_training(make_store, trained, seen):
    own = make_store([9, 9, 9], seed=1, clusters=["ann", "bob", None])
    stores = {
        "own": own,
        "bob": make_store([9], clusters=["bob"]),
        "eve": make_store([9], seed=5, clusters=["eve"]),
        "plain": make_store([9], seed=3),
    }
    found = EvaluationText(own).seen([stores[name] for name in trained])
    assert (None if found is None else found.tolist()) == seen
    assert not EvaluationText(stores["plain"]).seen([stores["bob"]]).any()


def test_unigram_by_hand(make_store):
    store = make_store([6], seed=4)
    store.documents = [np.array([1, 5, 5, 7, 2], dtype=np.uint16)]
    store.lengths = np.array([5])
    got = unigram_nll(store, np.array([5, 7, 3]), 23)
    assert np.exp(-got) == pytest.approx([3 / 26, 2 / 26, 1 / 26])
    everything = np.exp(-unigram_nll(store, np.arange(23), 23))
    assert everything.sum() == pytest.approx(1)
