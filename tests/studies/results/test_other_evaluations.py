"""Results of tasks, attention, generated text and loss by position."""

import numpy as np
import pytest

from studies.report import report_tables as tables
from studies.results.other_evaluations import read_other
from studies.results.stored import read_study
from tests.studies.results.test_loss_comparison import half_width
from tests.studies.synthetic import CHANCE, TASK_LENGTHS, results, with_others


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
    table = read("passkey")
    cells = [one["cells"][1] for one in stored(record, "window", "passkey")]
    shares = np.array([cell["unit_accuracy"] for cell in cells])
    parts = [(shares.mean(1).var(ddof=1) / 3, 2), (shares.mean(0).var(ddof=1) / 20, 19)]
    row = table.get("window", "accuracy", 256)
    # rope, rope + yarn, window, alibi and the failed kerple, at four lengths
    assert row.interval.family == 5 * len(TASK_LENGTHS)
    assert (row.value, row.half) == pytest.approx((shares.mean(), half_width(parts, 20)))
    assert table.value("window", "exact", 256) == pytest.approx(shares.mean() / 2)
    assert row.verdict == "above chance"
    assert table.get("rope", "accuracy", 1024).verdict == "not shown above chance"
    assert table.names == ["rope", "rope + yarn", "window", "alibi"]


def test_accuracies_significantly_above_chance_are_shaded(read):
    table = read("passkey")
    tones = set()
    for variant, *cells in tables.accuracy(table).rows:
        for length, cell in zip(TASK_LENGTHS, cells, strict=True):
            is_above = table.get(variant, "accuracy", length).low > CHANCE
            assert cell.tone == ("held" if is_above else "")
            tones.add(cell.tone)
    assert tones == {"held", ""}
    rows = {tuple(row[:2]): row[2:] for row in tables.accuracy_by_depth(table).rows}
    assert rows["alibi", "1,024"] == ["64%", "68%", "72%", "76%", "80%"]


@pytest.mark.parametrize("change", ["seeds", "items"])
def test_few_seeds_and_other_items_make_no_claims(change):
    record = with_others(results(seeds=2 if change == "seeds" else 3, schemes=("rope", "window")))
    if change == "items":
        stored(record, "window", "passkey")[1]["items_hash"] = "ff" * 32
    rows = read_other(read_study(record), "passkey", ()).select("accuracy", "window")
    assert {row.verdict for row in rows} == {"points only"}
    assert rows[0].interval.seeds == (2,)


def test_attention_is_the_mean_over_layers_heads_and_seeds(record, read):
    table = read("attention")
    values = [
        row["value"]
        for one in stored(record, "rope", "attention")
        for row in one["cells"]
        if (row["method"], row["length"], row["measure"], row["layer"])
        == ("yarn", 512, "logit_std", None)
    ]
    assert table.value("rope + yarn", "logit_std", 512) == pytest.approx(np.mean(values))
    assert min(row.value for row in table.rows.values()) > -1  # no single layer among them
    ends = [table.value("rope", "logit_max", n) for n in (256, 1024)]
    row = ["rope", f"{ends[0]:.3g} → {ends[1]:.3g}"]
    assert row in tables.measures(table, {"logit_max": "largest"}).rows


def test_generated_text_is_shown_by_its_first_and_last_positions(read):
    headings = {"repeated_4": "repeated", "nll": "NLL"}
    rows = tables.measures(read("generation"), headings).rows
    assert ["rope, greedy", "0.5 → 0.7", "2 → 4"] in rows


def test_loss_evaluations_are_not_read_as_others(read):
    assert read("long") is None and read("nowhere") is None
