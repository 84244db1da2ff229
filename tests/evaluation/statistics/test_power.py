"""scripts/power.py and its statistics: from results files to numbers of seeds and documents."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from errors import EvaluationError
from evaluation.statistics.power import half_to_detect, needs, read_measured

UNITS = 12


def evaluation(seed, shift=0.0, scheme="rope", targets="t", units=UNITS):
    """results.json of one run: as trained at 64 and 128, one method, the baseline of both."""
    rng = np.random.default_rng(seed)
    level = 3 + shift + 0.01 * rng.normal() + 0.2 * np.random.default_rng(99).normal(size=units)
    cells = {("trained", 64): level, ("trained", 128): level + 0.1 + 0.05 * rng.normal(size=units)}
    cells |= {("yarn", 128): level + 0.01 * rng.normal(size=units), ("truncate", 128): level}
    return {
        "trained_length": 64,
        "targets_hash": targets,
        "units": {"kind": "document", "names": [f"d{i}" for i in range(units)]},
        "cells": [
            {"method": method, "length": length, "scheme": scheme, "unit_nll": values.tolist()}
            for (method, length), values in cells.items()
        ],
    }


@pytest.fixture
def file(tmp_path):
    def write(content, name="results.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_difference_is_detected_with_requested_power():
    """Simulated at a known spread: an interval of that half-width leaves out zero so often."""
    assert half_to_detect(0.02, 0.5) == pytest.approx(0.02)
    for power, family in ((0.8, 1), (0.9, 8)):
        half = half_to_detect(0.02, power, family=family)
        sd = half / stats.norm.ppf(1 - 0.025 / family)
        seen = np.abs(np.random.default_rng(1).normal(0.02, sd, 100_000)) > half
        assert seen.mean() == pytest.approx(power, abs=0.005)
    for bad in ({"difference": 0.0}, {"difference": math.nan}, {"difference": 1.0, "power": 1.0}):
        with pytest.raises(EvaluationError):
            half_to_detect(**bad)


def test_units_needed_for_one_checkpoint(file):
    content = evaluation(1)
    schemes = read_measured([file(content)])
    found = {
        (one.comparison.split(": ")[1].split(" ")[0], one.length): one
        for one in needs(schemes, 0.02)
    }
    assert set(found) == {("trained", 128), ("yarn", 128)}  # the baseline is no method
    one = found["trained", 128]
    a, b = (np.array(content["cells"][i]["unit_nll"]) for i in (1, 0))
    assert one.estimate == pytest.approx((a - b).mean()) and (one.seeds, one.units) == ((1,), UNITS)
    assert one.half == pytest.approx(stats.t.ppf(0.975, UNITS - 1) * stats.sem(a - b))

    def half(units):
        return stats.t.ppf(0.975, units - 1) * (a - b).std(ddof=1) / math.sqrt(units)

    assert (
        half(one.more_units) <= half_to_detect(0.02) < half(one.more_units - 1)
        and one.more_seeds is None
    )


def test_seeds_are_pooled_and_schemes_compared(file):
    paths = [file(evaluation(i), f"a{i}/results.json") for i in range(3)]
    paths += [file(evaluation(10 + i, 0.05, "alibi"), f"b{i}/results.json") for i in range(4)]
    schemes = read_measured(paths)
    seeds = {one.name: len(one.tables["trained", 64]) for one in schemes}
    assert seeds == {"rope (64)": 3, "alibi (64)": 4}
    found = needs(schemes, 0.05, wanted=lambda method, length: method == "trained" and length == 64)
    (one,) = found  # as trained at 64 is the reference itself, so only the schemes are compared
    assert one.comparison == "alibi (64) against rope (64): trained" and one.seeds == (4, 3)
    a, b = (
        np.array([evaluation(*args)["cells"][0]["unit_nll"] for args in runs])
        for runs in ([(10 + i, 0.05) for i in range(4)], [(i,) for i in range(3)])
    )
    assert one.estimate == pytest.approx(a.mean() - b.mean())
    va = a.mean(1).var(ddof=1)
    vb = b.mean(1).var(ddof=1)
    vd = (a.mean(0) - b.mean(0)).var(ddof=1)

    def half(seeds):
        parts = [(va / seeds, seeds - 1), (vb / seeds, seeds - 1), (vd / UNITS, UNITS - 1)]
        total = sum(v for v, _ in parts)
        df = total**2 / sum(v**2 / n for v, n in parts)
        return stats.t.ppf(0.975, df) * math.sqrt(total)

    wanted = half_to_detect(0.05)
    assert half(one.more_seeds) <= wanted and (
        one.more_seeds == 3 or half(one.more_seeds - 1) > wanted
    )


def test_study_results_are_read_by_cell(file):
    cells = [
        {
            "id": f"scheme={scheme},seed={seed}",
            "axes": {"scheme": scheme, "seed": str(seed)},
            "evaluations": {
                "long": evaluation(seed, scheme == "alibi"),
                "passkey": {"cells": [{"depth": 0}]},
            },
        }
        for scheme in ("rope", "alibi")
        for seed in range(3)
    ]
    cells.append(
        {"id": "scheme=t5,seed=0", "axes": {"scheme": "t5", "seed": "0"}, "evaluations": {}}
    )
    study = {"format": 1, "study": {}, "cells": cells}
    assert [(one.name, len(one.tables["trained", 64])) for one in read_measured([file(study)])] == [
        ("scheme=rope", 3),
        ("scheme=alibi", 3),
    ]
    for cell in cells[:6]:
        cell["evaluations"]["short"] = cell["evaluations"]["long"]
    with pytest.raises(EvaluationError, match="--evaluation NAME"):
        read_measured([file(study)])
    assert len(read_measured([file(study)], "short")) == 2
    with pytest.raises(EvaluationError, match="no finished evaluation"):
        read_measured([file(study)], "other")


def test_unreadable_results_raise_one_error(file, tmp_path):
    old = evaluation(1)
    del old["units"]
    for content, message in (
        ("{", "JSON"),
        ([1], "not the results.json"),
        (old, "settings.yaml"),
    ):
        with pytest.raises(EvaluationError, match=message):
            read_measured([file(content)])
    with pytest.raises(EvaluationError, match="No such file"):
        read_measured([tmp_path / "none.json"])
    with pytest.raises(EvaluationError, match="other targets"):
        read_measured([file(evaluation(1)), file(evaluation(2, targets="u"), "b.json")])
