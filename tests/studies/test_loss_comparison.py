"""Results of a loss evaluation, against values computed here from the stored losses."""

import copy
import math

import numpy as np
import pytest
from scipy import stats

from errors import StudyError
from evaluation.statistics.results_table import select
from studies.study_report import findings
from studies.study_results_reader import read_study
from studies.study_results_table import read_losses
from tests.studies.synthetic import L0, LENGTHS, results
from tests.tables import find, value

VARIANTS = {"rope": ("rope", "trained"), "rope + yarn": ("rope", "yarn")}
VERDICTS = 9 * 4 - 4  # kerple failed but counts; learned positions have no longer lengths
DIFFERENCES = 8 * 2
WEIGHTS = [64 * (6 + j % 3) for j in range(9)]  # targets of each unit
FAILURE = {"nll": None, "unit_nll": None, "failure": "not finite", "exists": True}


def derived(record: dict, group=()):
    study = read_study(record)
    return read_losses(study, study.evaluations[0], group)


def stored_rows(record: dict, scheme: str, method: str = "trained", lengths=LENGTHS, seed=None):
    return [
        row
        for cell in record["cells"]
        if cell["status"] == "done" and cell["axes"]["scheme"] == scheme
        if seed is None or cell["axes"]["seed"] == str(seed)
        for row in cell["evaluations"]["long"]["cells"]
        if row["method"] == method and row["length"] in lengths
    ]


def nll_of(record: dict, name: str, length: int) -> np.ndarray:
    """(S, D) of a variant, straight from the file."""
    scheme, method = VARIANTS.get(name, (name, "trained"))
    rows = stored_rows(record, scheme, method, [length])
    return np.array([row["unit_nll"] for row in rows], dtype=float)


def half_width(parts: list[tuple[float, int]], family: int = 1) -> float:
    """± t(df)·√V for V = Σ of (variance of a mean, degrees of freedom), at 5% for all of a family,
    whose degrees of freedom are weighted by the shares of V to the 4/3."""
    total = sum(v for v, _ in parts)
    if total == 0:
        return 0.0
    power = 2 if family == 1 else 4 / 3
    df = 1 / sum((v / total) ** power / n for v, n in parts)
    quantile = float(stats.t.ppf(1 - 0.05 / family / 2, df))
    return quantile * math.sqrt(total)


def variance_of_mean(units: np.ndarray) -> float:
    """Of the mean over targets of units with WEIGHTS targets, cluster by cluster."""
    mean = np.average(units, weights=WEIGHTS)
    total = 0.0
    for weight, unit in zip(WEIGHTS, units, strict=True):
        total += (weight / sum(WEIGHTS) * (unit - mean)) ** 2
    return len(units) / (len(units) - 1) * total


def two_way(a: np.ndarray, family: int = 1) -> tuple[float, float]:
    """(mean, half-width) over seeds and units of a paired (S, D)."""
    seeds, units = a.shape
    means = np.average(a, axis=1, weights=WEIGHTS)
    parts = [
        (means.var(ddof=1) / seeds, seeds - 1),
        (variance_of_mean(a.mean(axis=0)), units - 1),
    ]
    return float(means.mean()), half_width(parts, family)


def mean_and_half(row) -> tuple[float, float]:
    return row.value, (row.high - row.low) / 2


def verdicts(comparison, name: str) -> list[str]:
    return [row.verdict for row in comparison.beyond(name)]


@pytest.fixture(scope="module")
def record():
    return results()


@pytest.fixture(scope="module")
def comparison(record):
    return derived(record)


@pytest.mark.parametrize("name", ["rope", "rope + yarn", "none", "window", "alibi"])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_number_of_the_table_by_hand(record, comparison, name, length):
    nll = nll_of(record, name, length)
    base = nll_of(record, name.split(" ")[0], L0)
    means = np.average(nll, axis=1, weights=WEIGHTS)
    delta = two_way(nll - base, VERDICTS)
    gain = two_way(base - nll)
    expected = {
        "nll": two_way(nll),
        "delta": delta,
        "gain": gain,
        "delta_upper_one_sided": (gain[1] - gain[0], math.nan),  # an end of a 95% interval
        "perplexity": (math.exp(means.mean()), math.nan),
        "bits_per_byte": (means.mean() / 2.3, math.nan),
    }
    if name != "rope" and length in (256, 4096):
        rope = nll_of(record, "rope", length)
        if name == "rope + yarn":  # the same checkpoints
            expected["difference"] = two_way(nll - rope, DIFFERENCES)
        else:
            units = nll.mean(0) - rope.mean(0)
            samples = [np.average(one, axis=1, weights=WEIGHTS) for one in (nll, rope)]
            parts = [(sample.var(ddof=1) / 3, 2) for sample in samples]
            half = half_width([*parts, (variance_of_mean(units), 8)], DIFFERENCES)
            expected["difference"] = (np.average(units, weights=WEIGHTS), half)
    for metric, (mean, half) in expected.items():
        row = find(comparison.table, name, metric, length)
        assert mean_and_half(row) == pytest.approx((mean, half), abs=1e-9, nan_ok=True), metric
    seeds = [row.value for row in comparison.rows("nll", name, seed=None) if row.length == length]
    assert seeds == pytest.approx([means.mean(), *means])
    assert (comparison.family, comparison.difference_family) == (VERDICTS, DIFFERENCES)


def test_verdicts_follow_the_truth(comparison):
    words = {name: verdicts(comparison, name) for name in comparison.names}
    assert words == {
        "rope": ["broken"] * 4,
        "rope + yarn": ["held", "broken", "broken", "broken"],
        "none": ["broken"] * 4,
        "alibi": ["held"] * 4,
        "window": ["held"] * 4,
        "learned": [],
        "sinusoidal": ["broken"] * 4,
        "fox": ["points only"] * 4,
    }
    ends = {
        name: (
            value(comparison.table, name, "held_to"),
            value(comparison.table, name, "break_point"),
        )
        for name in ("rope + yarn", "window", "fox")
    }
    assert ends == {"rope + yarn": (512, 1024), "window": (4096, None), "fox": (None, None)}


@pytest.mark.parametrize(
    ("key", "value"),
    [("targets_hash", "ff" * 32), ("dtype", "bfloat16"), ("trained_length", 128)],
)
def test_results_that_cannot_be_compared_are_excluded(record, key, value):
    other = copy.deepcopy(record)
    changed = next(c for c in other["cells"] if c["id"] == "scheme=none,seed=1")
    changed["evaluations"]["long"][key] = value
    comparison = derived(other)
    ((cell, reason),) = [key for key, each in comparison.missing.items() if each == "all"]
    assert cell == "scheme=none,seed=1"
    assert key in reason
    rows = comparison.rows("nll", "none", seed=None)
    assert {row.seed for row in rows} == {"", "0", "2"}


def test_a_length_that_fails_for_one_seed_has_no_verdict(comparison):
    """A scheme whose loss is not finite for one of four seeds is not held for the other three."""
    record = results(seeds=4)
    assert value(derived(record).table, "alibi", "held_to") == 4096
    unmeasured = copy.deepcopy(record)
    for cell in unmeasured["cells"]:
        if cell["axes"] == {"scheme": "alibi", "seed": "2"}:
            (row,) = stored_rows({"cells": [cell]}, "alibi", lengths=[1024])
            cell["evaluations"]["long"]["cells"].remove(row)
    stored_rows(record, "alibi", lengths=[1024], seed=2)[0].update(FAILURE)
    for failed in (derived(unmeasured), derived(record)):
        check_is_not_held_from_1024(failed, comparison)
    assert value(derived(record).table, "window", "context_reach") == 256
    stored_rows(record, "window", lengths=[1024], seed=2)[0].update(FAILURE)
    assert value(derived(record).table, "window", "context_reach") == 2048


def check_is_not_held_from_1024(failed, comparison):
    assert find(failed.table, "alibi", "nll", 1024) is None
    assert value(failed.table, "alibi", "held_to") == 512
    assert verdicts(failed, "alibi") == ["held", "inconclusive", "inconclusive"]
    assert failed.family == comparison.family  # it was to be measured, and counts


def test_a_seed_that_fails_at_the_trained_length_is_in_no_difference():
    record = results(seeds=4)
    stored_rows(record, "alibi", lengths=[L0], seed=2)[0].update(FAILURE)
    failed = derived(record)
    assert set(verdicts(failed, "alibi")) == {"inconclusive"}
    assert {row.seeds for row in failed.rows("delta", "alibi")} == {"3"}


@pytest.mark.parametrize(
    "off, has_verdict",
    [
        (0.0019, True),
        (0.0021, False),
        (-0.0021, False),
    ],
)
@pytest.mark.parametrize("method", ["trained", "yarn"])
def test_no_verdict_where_bfloat16_is_off_by_a_tenth_of_the_tolerance(
    record, off, has_verdict, method
):
    other = copy.deepcopy(record)
    stored_rows(other, "rope", method, [512], seed=1)[0]["bfloat16_minus_float32"] = off
    rounded = derived(other)
    expected = {"held", "broken"} if has_verdict else {"inconclusive"}
    assert set(verdicts(rounded, "rope + yarn")) == expected
    assert ("bfloat16" in " ".join(findings(rounded))) != has_verdict
    assert value(rounded.table, "alibi", "held_to") == 4096
    if method == "yarn":  # as trained it is exact
        assert set(verdicts(rounded, "rope")) == {"broken"}


def test_other_axes_form_groups_that_are_compared_separately():
    record = results(schemes=("rope", "window"))
    wide = copy.deepcopy(record["cells"])
    for cell in record["cells"]:
        cell["axes"]["size"] = "slim"
    for cell in wide:
        cell["axes"]["size"] = "wide"
    record["cells"] += wide
    for row in stored_rows({"cells": wide}, "window"):
        row["unit_nll"] = [value - 0.5 for value in row["unit_nll"]]
    slim, wide = (derived(record, (("size", size),)).table for size in ("slim", "wide"))
    for name, change in (("rope", 0.0), ("window", 0.5)):
        ours, theirs = (find(table, name, "nll_as_trained", L0) for table in (slim, wide))
        assert ours.value - theirs.value == pytest.approx(change)
        assert ours.seeds == theirs.seeds == "3"


def test_invalid_results_files_are_rejected(record):
    for bad, words in ((record | {"format": 2}, "format 2"), ({"format": 1}, "format 1")):
        with pytest.raises(StudyError, match=words):
            derived(bad)


def test_read_gains_of_repeated_text(record):
    record = copy.deepcopy(record)
    rng = np.random.default_rng(0)
    stored = {}
    for cell in record["cells"]:
        rows = []
        for method in ("trained", "yarn"):
            losses = rng.normal(3, 1, (2, 9))
            row = {"method": method, "length": 2 * L0, "distance_low": 32, "distance_high": 64}
            row |= {"unit_targets": WEIGHTS}
            rows.append(row | {"unit_nll": losses[0], "unit_control_nll": losses[1]})
            stored.setdefault((cell["axes"]["scheme"], method), []).append(losses)
        if cell["status"] == "done":
            cell["evaluations"]["long"]["repeated"] = {"hash": "a", "cells": rows}
    other = next(cell for cell in record["cells"] if cell["axes"]["scheme"] == "none")
    other["evaluations"]["long"]["repeated"]["hash"] = "of other targets"
    stored["none", "trained"] = stored["none", "trained"][1:]
    table = derived(record).table
    for name, place in {**VARIANTS, "none": ("none", "trained")}.items():
        nll, control = np.stack(stored[place], axis=1)
        values = {"repeated_nll": nll, "control_nll": control, "read_gain": control - nll}
        for metric, expected in values.items():
            row = find(table, name, metric, 2 * L0, at=32)
            mean, half = two_way(expected)
            assert row.value == pytest.approx(mean, abs=1e-12)
            assert math.isnan(row.low) or mean_and_half(row)[1] == pytest.approx(half, rel=1e-9)
            assert (row.until, row.seeds) == (64, str(len(nll)))
    # the loss of one seed was not finite at this length
    cell = next(cell for cell in record["cells"] if cell["axes"]["scheme"] == "window")
    del cell["evaluations"]["long"]["repeated"]["cells"][0]
    found = {row.variant for row in derived(record).rows("read_gain")}
    assert found == {row.variant for row in select(table, "read_gain")} - {"window"}


def test_a_length_given_twice_counts_once():
    record = results()
    once = repr(derived(record).rows("difference"))
    record["study"]["report"]["lengths"] = [256, 4096, 256]
    assert repr(derived(record).rows("difference")) == once  # with the same family
