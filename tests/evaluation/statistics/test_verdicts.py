import math

import numpy as np
import pytest

from evaluation.statistics.loss_verdicts import (
    VariantLosses,
    VerdictRules,
    is_undertrained,
    verdict_rows,
)
from evaluation.statistics.results_table import results_table, select
from tests.tables import find, value

UNITS = 30


def judged(differences, tolerance=0.02, family=1, failed=(), is_precise=True, has_learned=True):
    """The long table for NLL whose unit differences from the reference, at 64, have exactly this
    mean and sd."""
    changes = {64: np.zeros(UNITS)}
    for length, (mean, sd) in differences.items():
        draws = np.random.default_rng(length).normal(size=UNITS)
        changes[length] = (draws - draws.mean()) / draws.std(ddof=1) * sd + mean
    rules = VerdictRules(64, tolerance, np.ones(UNITS), 0.05, family, has_learned, is_precise)
    nll = {length: own for length, own in changes.items() if length not in failed}
    losses = VariantLosses(nll=nll, truncated_nll=np.zeros(UNITS), failed_lengths=failed)
    return results_table(verdict_rows("x", losses, rules))


def words(*arguments, **options):
    return [row.verdict for row in select(judged(*arguments, **options), "delta") if row.verdict]


def test_held_broken_inconclusive():
    differences = {128: (0.001, 0.02), 256: (0.015, 0.1), 512: (0.3, 0.1)}
    assert words(differences) == ["held", "inconclusive", "broken"]
    table = judged(differences)
    assert (value(table, "x", "held_to"), value(table, "x", "break_point")) == (128, 512)
    assert words(differences, is_precise=False) == ["inconclusive"] * 3
    assert words(differences, has_learned=False) == ["inconclusive", "inconclusive", "broken"]
    assert value(table, "x", "delta", 64) == 0
    assert not find(table, "x", "delta", 64).verdict


@pytest.mark.parametrize(
    "failed, word",
    [
        (64, "inconclusive"),
        (128, "inconclusive"),
        (512, "held"),
        (32, "held"),
    ],
)
def test_missing_shorter_length_stops_testing(failed, word):
    assert words({256: (0.0, 0.001)}, failed=[failed]) == [word]


def test_lengths_below_trained_have_no_verdict():
    assert words({32: (1.0, 0.1), 128: (0.0, 0.001)}) == ["held"]
    # a method that is worse at the trained length does not hold beyond it
    assert words({64: (0.1, 0.001), 128: (0.0, 0.001)}) == ["inconclusive"]


def test_half_a_nat_below_a_unigram_model_is_not_undertrained():
    assert [is_undertrained(nll, 2.0) for nll in (1.499, 1.5, 1.501)] == [False, False, True]


@pytest.mark.parametrize("family, t", [(1, 2.045229642), (8, 2.951)])  # t(29) at 1 - 0.025/family
def test_thresholds(family, t):
    """broken: the simultaneous lower bound; held: the one-sided upper bound in any family."""
    edge = 0.02 + t * 0.1 / math.sqrt(UNITS)
    assert words({128: (edge + 1e-4, 0.1)}, family=family) == ["broken"]
    assert words({128: (edge - 1e-4, 0.1)}, family=family) == ["inconclusive"]
    edge = 0.02 - 2.045229642 * 0.03 / math.sqrt(UNITS)
    assert words({128: (edge - 1e-5, 0.03)}, family=family) == ["held"]
    assert words({128: (edge + 1e-5, 0.03)}, family=family) == ["inconclusive"]
