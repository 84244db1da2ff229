import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from evaluation.reports.figures import FigureText
from evaluation.reports.loss_report import gain_figure, loss_report, record_of, styles
from evaluation.statistics.analysis import analyze
from tests.artists import assert_shows, levels


def test_results_record_units_and_their_contamination(do, make_store, tmp_path):
    clusters = ["ann", "ann", "bob", None, "cy", "cy", None]
    store = make_store([90, 120, 75, 99, 130, 81, 77], seed=1, clusters=clusters)
    train = make_store([300, 40], seed=2, clusters=["cy", "doc3"])
    result = do(store=store, train=train)
    loss_report(result, analyze(result)).write(tmp_path)
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["units"] == {
        "kind": "cluster",
        "names": ["ann", "bob", "cy", "doc3", "doc6"],
        "targets": [20, 10, 20, 10, 10],
        "seen": [False, False, True, False, False],  # a document's name is no cluster
    }
    # documents in the order of the units, each with 10 targets
    of = [[0, 1], [2], [4, 5], [3], [6]]
    for cell in report["cells"]:
        nll = result.nll[cell["method"], cell["length"]].reshape(7, 10)
        assert cell["unit_nll"] == pytest.approx([nll[documents].mean() for documents in of])
    unigram = result.unigram.reshape(7, 10)
    assert report["unigram_unit_nll"] == pytest.approx(
        [unigram[documents].mean() for documents in of]
    )
    truncated = result.truncated.reshape(7, 10)
    assert report["truncated_unit_nll"] == pytest.approx(
        [truncated[documents].mean() for documents in of]
    )


def test_contaminated_units_are_reported_separately(do, make_store):
    names = [f"author {i // 2}" for i in range(14)] + ["known"] * 2
    store = make_store([75 + 3 * i for i in range(16)], seed=1, clusters=names)
    train = make_store([300, 40], seed=2, clusters=["known", "author 3"])
    result = do(store=store, train=train, methods=["trained", "truncate", "yarn"])
    analysis = analyze(result)
    table = analysis.table
    new = [d for d in range(14) if d // 2 != 3]
    means = result.nll["yarn", 64].reshape(16, 10)[new].reshape(6, 20).mean(axis=1)
    base = result.nll["trained", 16].reshape(16, 10)[new].reshape(6, 20).mean(axis=1)
    assert table.value("yarn", "nll", 64) != pytest.approx(means.mean())
    assert table.get("yarn", "nll", 64, "unseen").value == pytest.approx(means.mean())
    # simultaneous over 2 methods at 2 lengths
    half = stats.t.ppf(1 - 0.025 / 4, 5) * stats.sem(means - base)
    delta = table.get("yarn", "delta", 64, "unseen")
    mean = (means - base).mean()
    assert (delta.value, delta.high - mean) == pytest.approx((mean, half)) and not delta.verdict
    assert all(math.isnan(row.low) for row in table.select("nll", where="seen"))
    for part, units in (("unseen", 6), ("seen", 2)):
        own = table.select("gain", where=part)
        assert len(own) == 9 and {row.units for row in own} == {units}


def test_every_derived_column_by_hand(do):
    """Seven documents; verdicts of three methods at two lengths are one family."""
    result = do()
    analysis = analyze(result)
    cells = record_of(result, analysis)["cells"]
    rows = {(row["method"], row["length"]): row for row in cells}
    base = result.nll["trained", 16]
    unit = result.unit

    def interval(values, share=0.05):
        means = [values[unit == one].mean() for one in np.unique(unit)]
        half = stats.t.ppf(1 - share / 2, 6) * np.std(means, ddof=1) / math.sqrt(7)
        return {"": np.mean(means), "_low": np.mean(means) - half, "_high": np.mean(means) + half}

    for (method, length), row in rows.items():
        nll = result.nll[method, length]
        expected = {"nll": nll.mean(), "perplexity": math.exp(nll.mean())}
        expected["bits_per_byte"] = nll.sum() / math.log(2) / result.n_bytes
        expected |= {f"nll{end}": value for end, value in interval(nll).items() if end}
        expected |= {f"gain{end}": value for end, value in interval(base - nll).items()}
        if method != "truncate" and length > 16:
            delta = interval(nll - base, 0.05 / 6)
            expected |= {f"delta{end}": value for end, value in delta.items()}
            expected |= {f"perplexity_ratio{end}": math.exp(value) for end, value in delta.items()}
            upper = {n: interval(result.nll[method, n] - base)["_high"] for n in (16, 32, 64)}
            expected["delta_upper_one_sided"] = upper[length]
            held = all(upper[n] < 0.02 for n in upper if n <= length)
            word = "broken" if delta["_low"] > 0.02 else "held" if held else "inconclusive"
            assert row["verdict"] == word
            sd = np.std([(nll - base)[unit == one].mean() for one in np.unique(unit)], ddof=1)
            enough = row["units_needed"]
            assert (enough is None) == (half_of(7, sd) <= 0.02)
            assert enough is None or half_of(enough, sd) <= 0.02 < half_of(enough - 1, sd)
        else:
            assert row["delta"] is None and row["verdict"] is None and row["units_needed"] is None
        if method != "truncate" and length > 16:
            step = interval(result.nll[method, length // 2] - nll)
            expected |= {f"gain_per_doubling{end}": value for end, value in step.items()}
        for key, value in expected.items():
            assert row[key] == pytest.approx(value, rel=1e-6, abs=1e-9), (method, length, key)


def half_of(units, sd):
    return stats.t.ppf(1 - 0.05 / 6 / 2, units - 1) * sd / math.sqrt(units)


def test_absent_cells_are_not_in_the_family(do):
    """Simultaneous intervals are over the cells that exist and are judged, with those that
    failed."""
    result = do(methods=["trained", "truncate", "yarn", "window"])
    assert analyze(result).family == 6
    absent = {("yarn", 64): "its positions end after 40 tokens", ("yarn", 16): "another reason"}
    left = {cell: nll for cell, nll in result.nll.items() if cell not in absent}
    analysis = analyze(replace(result, nll=left, absent=absent))
    assert analysis.family == 5
    assert {row.family for row in analysis.table.select("delta")} == {5}
    failed = replace(result, nll=left, absent={}, failed=absent)
    assert analyze(failed).family == 6


def test_net_gains_are_drawn_around_truncated_context(do):
    result = do()
    results = loss_report(result, analyze(result)).results
    (axes,) = gain_figure(results, FigureText(), styles(results)).axes
    assert_shows(axes, [row.negated for row in results.table.select("delta")])
    assert levels(axes) == [0]
