import math

import numpy as np
import pytest

from evaluation.statistics.verdicts import by_position, judge

UNITS = 30
SPAN = 5
UNIT = np.repeat(np.arange(UNITS), 3 * SPAN)
REFERENCE = np.random.default_rng(0).gamma(2.0, size=len(UNIT))


def words(differences, tolerance=0.02, **kwargs):
    return [verdict.word for verdict in verdicts(differences, tolerance, **kwargs).verdicts]


def verdicts(differences, tolerance=0.02, family=1, failed=()):
    """Of NLL whose unit differences from the reference, at 64, have exactly this mean and sd."""
    nll = {64: REFERENCE}
    for length, (mean, sd) in differences.items():
        draws = np.random.default_rng(length).normal(size=UNITS)
        unit = (draws - draws.mean()) / draws.std(ddof=1) * sd + mean
        nll[length] = REFERENCE + unit[UNIT]
    return judge(
        "method",
        nll,
        REFERENCE,
        UNIT,
        64,
        tolerance=tolerance,
        family=family,
        span=SPAN,
        failed=failed,
    )


def test_held_broken_inconclusive():
    result = verdicts({128: (0.001, 0.02), 256: (0.015, 0.1), 512: (0.3, 0.1)})
    assert [v.word for v in result.verdicts] == ["held", "inconclusive", "broken"]
    assert (result.held_to, result.break_point) == (128, 512)


@pytest.mark.parametrize("failed, word", [(128, "inconclusive"), (512, "held")])
def test_failed_shorter_length_stops_testing(failed, word):
    assert words({256: (0.0, 0.001)}, failed=[failed]) == [word]


def test_lengths_below_trained_have_no_verdict():
    assert words({32: (1.0, 0.1), 128: (0.0, 0.001)}) == ["held"]


@pytest.mark.parametrize("family, t", [(1, 2.045229642), (8, 2.951)])  # t(29) at 1 - 0.025/family
def test_thresholds(family, t):
    """broken: the simultaneous lower bound; held: the one-sided upper bound in any family."""
    edge = 0.02 + t * 0.1 / math.sqrt(UNITS)
    assert words({128: (edge + 1e-4, 0.1)}, family=family) == ["broken"]
    assert words({128: (edge - 1e-4, 0.1)}, family=family) == ["inconclusive"]
    edge = 0.02 - 2.045229642 * 0.03 / math.sqrt(UNITS)
    assert words({128: (edge - 1e-5, 0.03)}, family=family) == ["held"]
    assert words({128: (edge + 1e-5, 0.03)}, family=family) == ["inconclusive"]


def test_few_units_give_point_estimates():
    unit = np.arange(5)
    zeros = np.zeros(5)
    result = judge("x", {8: zeros, 16: unit * 1.0}, zeros, unit, 8, tolerance=0.02)
    assert result.verdicts[0].word == "points only"
    assert (result.held_to, result.break_point) == (None, None)


def test_buckets_are_geometric_and_paired():
    position = np.tile(np.arange(11), 7)
    unit = np.repeat(np.arange(7), 11)
    nll = np.where(position < 4, 3.0, 2.0)
    buckets = by_position(nll, nll + 0.25, position, unit, 0.05)
    edges = [(0, 1, 7), (1, 2, 7), (2, 4, 14), (4, 8, 28), (8, 16, 21)]
    assert [(b.low, b.high, b.count) for b in buckets] == edges
    assert [b.nll for b in buckets] == [3, 3, 3, 2, 2]
    assert all(b.gain.estimate == 0.25 and b.gain.units == 7 for b in buckets)
