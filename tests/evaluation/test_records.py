"""The numbers of results.json, from the losses of every target."""

import math

import pytest
from scipy import stats

from evaluation.methods import name_of
from evaluation.reports.loss_report import loss_report
from evaluation.reports.loss_results_json import record_of
from tests.tables import find


def means_of(result, values, names):
    """Means of targets over the units of these documents, each with 10 targets."""
    return [values.reshape(-1, 10)[documents].mean() for documents in names]


def test_results_record_units(do, make_store):
    clusters = ["ann", "ann", "bob", None, "cy", "cy", None]
    store = make_store([90, 120, 75, 99, 130, 81, 77], seed=1, clusters=clusters)
    train = make_store([300, 40], seed=2, clusters=["cy", "doc3"])
    result = do(store=store, train=train)
    record = record_of(result)
    assert record["units"] == {
        "kind": "cluster",
        "names": ["ann", "bob", "cy", "doc3", "doc6"],
        "targets": [20, 10, 20, 10, 10],
    }
    documents = [[0, 1], [2], [4, 5], [3], [6]]  # in the order of the units
    losses = {"unigram": result.unigram, "truncated": result.truncated_nll}
    for name, nll in losses.items():
        expected = means_of(result, nll, documents)
        assert record[f"{name}_unit_nll"] == pytest.approx(expected)
    for cell in record["cells"]:
        expected = means_of(result, result.nll[cell["method"], cell["length"]], documents)
        assert cell["unit_nll"] == pytest.approx(expected)


def test_every_derived_column_by_hand(do):
    """Seven documents; verdicts of three methods at two lengths are one family."""
    result = do()
    result.unigram = None  # a random model is not called undertrained then
    table = loss_report({"run": result}).results.table
    base = result.nll["trained", 16]

    def interval(values, share=0.05):
        mean = sum(values) / len(values)
        errors = [sum(values[result.document == d] - mean) for d in sorted(set(result.document))]
        error = math.sqrt(7 / 6 * sum(each**2 for each in errors)) / len(values)
        half = stats.t.ppf(1 - share / 2, 6) * error
        return mean, mean - half, mean + half

    for (method, length), nll in result.nll.items():
        name = name_of(method)

        def row(metric, variant=name, length=length):
            return find(table, variant, metric, length)

        assert row("nll").value == pytest.approx(nll.mean())
        assert row("perplexity").value == pytest.approx(math.exp(nll.mean()))
        bits = nll.sum() / math.log(2) / result.n_bytes
        assert row("bits_per_byte").value == pytest.approx(bits)
        intervals = {"gain": interval(base - nll)}
        if method == "truncate":
            assert row("delta") is None
        elif length == 16:
            assert row("delta").verdict == ""
        else:
            delta = interval(nll - base, 0.05 / 6)
            step = interval(result.nll[method, length // 2] - nll)
            intervals |= {"delta": delta, "gain_per_doubling": step}
            upper = {n: interval(result.nll[method, n] - base)[2] for n in (16, 32, 64)}
            assert row("delta_upper_one_sided").value == pytest.approx(upper[length])
            held = all(upper[n] < 0.02 for n in upper if n <= length)
            word = "broken" if delta[1] > 0.02 else "held" if held else "inconclusive"
            assert row("delta").verdict == word
        for name, expected in intervals.items():
            found = (row(name).value, row(name).low, row(name).high)
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9), name


def test_absent_cells_are_not_in_the_family(do):
    """Simultaneous intervals are over the cells that exist and are judged, with those that
    failed."""
    result = do(methods=["trained", "truncate", "yarn", "window"])
    absent = {("yarn", 64): "its positions end after 40 tokens", ("yarn", 16): "another reason"}
    left = {cell: nll for cell, nll in result.nll.items() if cell not in absent}
    assert loss_report({"run": result}).results.family == 6
    result.nll = left
    result.failed = absent
    assert loss_report({"run": result}).results.family == 6
    result.absent = absent
    result.failed = {}
    rows = loss_report({"run": result}).results.rows("delta")
    assert {row.family for row in rows} == {5}
