"""Results of tasks, attention, generated text and loss by position."""

import numpy as np
import pytest

from evaluation.reports.task_report import task_tables
from studies.study_results_reader import read_study
from studies.study_results_table import read_other
from tests.studies.synthetic import TASK_LENGTHS, results, with_others
from tests.studies.test_loss_comparison import half_width, mean_and_half
from tests.tables import find, value


@pytest.fixture(scope="module")
def record():
    return with_others(results(schemes=("rope", "window", "alibi")))


@pytest.fixture
def read(record):
    return lambda name: read_other(read_study(record), name, ())


def stored(record, scheme, evaluation):
    return [
        cell["evaluations"][evaluation]
        for cell in record["cells"]
        if cell["axes"]["scheme"] == scheme and cell["status"] == "done"
    ]


def test_accuracy_has_intervals_over_seeds_and_units(record, read):
    r = read("passkey")
    cells = [one["cells"][1] for one in stored(record, "window", "passkey")]
    shares = np.array([cell["unit_accuracy"] for cell in cells])
    of_seeds = shares.mean(axis=1).var(ddof=1) / 3
    of_units = shares.mean(axis=0).var(ddof=1) / 20
    parts = [(of_seeds, 2), (of_units, 19)]
    row = find(r.table, "window", "accuracy", 256)
    # rope, rope + yarn, window, alibi and the failed kerple, at four lengths
    assert row.family == 5 * len(TASK_LENGTHS)
    assert mean_and_half(row) == pytest.approx((shares.mean(), half_width(parts, 20)))
    assert value(r.table, "window", "exact", 256) == pytest.approx(shares.mean() / 2)
    assert row.verdict == "above chance"
    assert find(r.table, "rope", "accuracy", 1024).verdict == "not shown above chance"
    assert r.names == ["rope", "rope + yarn", "window", "alibi"]
    _, by_depth = task_tables(r)
    rows = {tuple(row[:2]): row[2:] for row in by_depth.rows}
    assert rows["alibi", "1,024"] == ["64%", "68%", "72%", "76%", "80%"]


@pytest.mark.parametrize("change", ["seeds", "items"])
def test_few_seeds_and_other_items_make_no_claims(change):
    record = with_others(results(seeds=2 if change == "seeds" else 3, schemes=("rope", "window")))
    if change == "items":
        stored(record, "window", "passkey")[1]["items_hash"] = "ff" * 32
    rows = read_other(read_study(record), "passkey", ()).rows("accuracy", "window")
    assert {(row.verdict, row.seeds) for row in rows} == {("points only", "2")}


@pytest.mark.parametrize(
    ("evaluation", "metric", "length"),
    [("passkey", "accuracy", 256), ("passkey", "exact", 256), ("attention", "logit_std", 512)],
)
def test_what_one_seed_lacks_has_no_number(evaluation, metric, length):
    record = with_others(results(schemes=("rope", "window")))
    result = stored(record, "window", evaluation)[1]
    result["cells"] = [cell for cell in result["cells"] if cell["length"] != length]
    table = read_other(read_study(record), evaluation, ()).table
    assert find(table, "window", metric, length) is None
    for name, other in (("rope", length), ("window", 2 * length)):
        assert find(table, name, metric, other) is not None


@pytest.mark.parametrize(
    ("evaluation", "place", "of_cell"),
    [
        (
            "attention",
            {"metric": "logit_std", "length": 512},
            {"measure": "logit_std", "length": 512, "layer": None},
        ),
        (
            "generation",
            {"metric": "nll", "where": "greedy", "at": 256},
            {"measure": "nll", "source": "greedy", "start": 256},
        ),
    ],
)
def test_other_metrics_are_means_over_seeds(record, read, evaluation, place, of_cell):
    wanted = (of_cell | {"method": "yarn"}).items()
    cells = [cell for each in stored(record, "rope", evaluation) for cell in each["cells"]]
    values = [cell["value"] for cell in cells if wanted <= cell.items()]
    table = read(evaluation).table
    row = find(table, "rope + yarn", **place)
    assert len(values) == 3
    assert row.value == pytest.approx(np.mean(values))
    assert row.verdict == ""
    assert np.isnan(row.low)
    assert min(row.value for row in table.itertuples()) > -1  # no single layer among them


def test_losses_by_position_are_means_over_seeds(record, read):
    buckets = [one["by_position"]["trained"][3] for one in stored(record, "window", "position")]
    table = read("position").table
    for metric, values in (
        ("nll_at_positions", [bucket["nll"] for bucket in buckets]),
        ("gain_at_positions", [bucket["gain"]["estimate"] for bucket in buckets]),
    ):
        row = find(table, "window", metric, at=8)
        assert row.value == pytest.approx(np.mean(values))
        assert row.until == 16
