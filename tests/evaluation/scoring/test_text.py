"""Evaluation text of a run: held-out documents, and training text where asked for."""

import numpy as np
import pytest

from evaluation.scoring.scoring import unigram_nll
from evaluation.scoring.text import EvaluationText


def test_units_seen_in_training(make_store):
    store = make_store([9, 9, 9], seed=1, clusters=["ann", "bob", None])
    assert EvaluationText(store).seen(make_store([9], clusters=["bob"])).tolist() == [
        False,
        True,
        False,
    ]
    assert EvaluationText(store).seen(store).tolist() == [True, True, True]
    assert EvaluationText(store).seen(make_store([9], seed=3)) is None  # it names no clusters
    assert EvaluationText(store).seen(None) is None
    bob = make_store([9], clusters=["bob"])
    eve = make_store([9], seed=5, clusters=["eve"])
    assert EvaluationText(store).seen(eve, bob).tolist() == [False, True, False]
    assert EvaluationText(store).seen(bob, eve).tolist() == [
        False,
        True,
        False,
    ]  # whichever training came first
    assert (
        EvaluationText(store).seen(bob, None) is None
        and EvaluationText(store).seen(bob, store).all()
    )
    plain = make_store([9, 9], seed=4)
    assert EvaluationText(plain).seen(make_store([9], clusters=["bob"])).tolist() == [False, False]


def test_unigram_by_hand(make_store):
    store = make_store([6], seed=4)
    store.documents = [np.array([1, 5, 5, 7, 2], dtype=np.uint16)]
    store.lengths = np.array([5])
    got = unigram_nll(store, np.array([5, 7, 3]), 23)
    assert np.exp(-got) == pytest.approx([3 / 26, 2 / 26, 1 / 26])
    everything = np.exp(-unigram_nll(store, np.arange(23), 23))
    assert everything.sum() == pytest.approx(1)
