import math

import numpy as np

from evaluation.statistics.verdicts import (
    by_position,
    judge,
)

UNITS = 30
SPAN = 5
SPANS = 3
N = UNITS * SPAN * SPANS
UNIT = np.repeat(np.arange(UNITS), SPAN * SPANS)


def shifted(mean, sd, seed=0):
    """A reference and an NLL whose unit differences have exactly this mean and sd."""
    rng = np.random.default_rng(seed)
    d = rng.normal(size=UNITS)
    d = (d - d.mean()) / d.std(ddof=1) * sd + mean
    reference = rng.gamma(2.0, size=N)
    return reference, reference + np.repeat(d, SPAN * SPANS)


def verdicts(differences, tolerance=0.02, family=1, failed=(), l0=64):
    reference, _ = shifted(0, 1)
    nll = {64: reference}
    for length, (mean, sd) in differences.items():
        nll[length] = reference + (
            shifted(mean, sd, seed=length)[1] - shifted(mean, sd, seed=length)[0]
        )
    return judge(
        "method",
        nll,
        reference,
        UNIT,
        l0,
        tolerance=tolerance,
        alpha=0.05,
        family=family,
        span=SPAN,
        failed=failed,
    )


def test_held_broken_inconclusive():
    got = verdicts({128: (0.001, 0.02), 256: (0.015, 0.1), 512: (0.3, 0.1)})
    assert [v.word for v in got.verdicts] == ["held", "inconclusive", "broken"]
    assert (got.held_to, got.break_point) == (128, 512)


def test_failed_shorter_length_stops_testing():
    assert [v.word for v in verdicts({256: (0.0, 0.001)}, failed=[128]).verdicts] == [
        "inconclusive"
    ]
    assert [v.word for v in verdicts({256: (0.0, 0.001)}, failed=[512]).verdicts] == ["held"]


def test_broken_threshold_is_simultaneous_lower_bound():
    # t(29) at 97.5%; at 1 - 0.025/8
    sd = 0.1
    t1 = 2.045229642
    t8 = 2.951
    edge1 = 0.02 + t1 * sd / math.sqrt(UNITS)
    edge8 = 0.02 + t8 * sd / math.sqrt(UNITS)
    assert edge8 > edge1
    for family, edge in ((1, edge1), (8, edge8)):
        assert verdicts({128: (edge + 1e-4, sd)}, family=family).verdicts[0].word == "broken"
        assert verdicts({128: (edge - 1e-4, sd)}, family=family).verdicts[0].word == "inconclusive"


def test_held_threshold_is_one_sided_upper_bound():
    edge = 0.02 - 2.045229642 * 0.03 / math.sqrt(UNITS)
    for family in (1, 8):
        assert verdicts({128: (edge - 1e-5, 0.03)}, family=family).verdicts[0].word == "held"
        assert (
            verdicts({128: (edge + 1e-5, 0.03)}, family=family).verdicts[0].word == "inconclusive"
        )


def test_lengths_below_trained_have_no_verdict():
    reference, _ = shifted(0, 1)
    got = judge(
        "x",
        {32: reference + 1, 64: reference, 128: reference},
        reference,
        UNIT,
        64,
        tolerance=0.02,
        alpha=0.05,
        family=1,
    )
    assert [(v.length, v.word) for v in got.verdicts] == [(128, "held")]


def test_few_units_give_point_estimates():
    few = np.arange(5)
    got = judge(
        "x",
        {8: np.zeros(5), 16: few * 1.0},
        np.zeros(5),
        few,
        8,
        tolerance=0.02,
        alpha=0.05,
        family=1,
    )
    assert got.verdicts[0].word == "points only" and got.held_to is None and got.break_point is None


def test_buckets_are_geometric_and_paired():
    position = np.tile(np.arange(11), 7)
    unit = np.repeat(np.arange(7), 11)
    nll = np.where(position < 4, 3.0, 2.0)
    buckets = by_position(nll, nll + 0.25, position, unit)
    assert [(b.low, b.high, b.count) for b in buckets] == [
        (0, 1, 7),
        (1, 2, 7),
        (2, 4, 14),
        (4, 8, 28),
        (8, 16, 21),
    ]
    assert [b.nll for b in buckets] == [3, 3, 3, 2, 2]
    assert all(b.gain.estimate == 0.25 and b.gain.units == 7 for b in buckets)
