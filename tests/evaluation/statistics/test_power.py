"""scripts/power.py and its statistics: from results files to numbers of seeds and documents."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from errors import EvaluationError
from evaluation.statistics.power import half_to_detect, needs, read_measured
from evaluation.statistics.seeds import compare, needed

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
    by_method = {
        need.comparison.split(": ")[1].split(" ")[0]: need
        for need in needs(read_measured([file(content)]), 0.02)
    }
    assert {(name, need.length) for name, need in by_method.items()} == {
        ("trained", 128),
        ("yarn", 128),
    }  # truncation is no method
    need = by_method["trained"]
    reference, longer = (np.array(cell["unit_nll"]) for cell in content["cells"][:2])
    change = longer - reference

    def half(units):
        return stats.t.ppf(0.975, units - 1) * change.std(ddof=1) / math.sqrt(units)

    assert need.now.estimate == pytest.approx(change.mean())
    assert need.now.half == pytest.approx(half(UNITS))
    assert (need.seeds, need.now.units, need.more_seeds) == ((1,), UNITS, None)
    assert half(need.more_units) <= half_to_detect(0.02) < half(need.more_units - 1)


def test_seeds_are_grouped_and_schemes_compared(file):
    ropes = [evaluation(seed) for seed in range(3)]
    alibis = [evaluation(seed, 0.05, "alibi") for seed in range(10, 14)]
    paths = [file(content, f"{n}/results.json") for n, content in enumerate(ropes + alibis)]
    schemes = read_measured(paths)
    seeds = {scheme.name: len(scheme.tables["trained", 64]) for scheme in schemes}
    assert seeds == {"rope (64)": 3, "alibi (64)": 4}
    # As trained at 64 is the reference itself, so only the schemes are compared.
    (need,) = [
        need for need in needs(schemes, 0.05) if (need.method, need.length) == ("trained", 64)
    ]
    assert need.comparison == "alibi (64) against rope (64): trained"
    a, b = (
        np.array([content["cells"][0]["unit_nll"] for content in contents])
        for contents in (alibis, ropes)
    )
    gap = compare(a, b)
    assert (need.now.estimate, need.now.half, need.seeds) == (gap.estimate, gap.half, (4, 3))
    assert (need.more_seeds, need.more_units) == needed(gap, half_to_detect(0.05))


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
    cells.append({"id": "t5", "axes": {"scheme": "t5", "seed": "0"}, "evaluations": {}})
    study = {"format": 1, "study": {}, "cells": cells}
    schemes = read_measured([file(study)])
    seeds = {scheme.name: len(scheme.tables["trained", 64]) for scheme in schemes}
    assert seeds == {"scheme=rope": 3, "scheme=alibi": 3}
    for cell in cells[:6]:
        cell["evaluations"]["short"] = cell["evaluations"]["long"]
    with pytest.raises(EvaluationError, match="--evaluation NAME"):
        read_measured([file(study)])
    assert len(read_measured([file(study)], "short")) == 2
    with pytest.raises(EvaluationError, match="no finished evaluation"):
        read_measured([file(study)], "other")


@pytest.mark.parametrize("content", ["{", [1], {"cells": []}])
def test_files_without_results_are_rejected(file, content):
    with pytest.raises(EvaluationError, match="results"):
        read_measured([file(content)])


def test_results_on_other_targets_are_rejected(file):
    with pytest.raises(EvaluationError, match="other targets"):
        read_measured([file(evaluation(1)), file(evaluation(2, targets="u"), "b.json")])
