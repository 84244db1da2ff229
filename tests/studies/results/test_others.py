import math

import numpy as np
import pytest
from scipy import stats

from studies.report import tables
from studies.report.report import write_report
from studies.results.others import read_other
from studies.results.stored import read_study
from tests.studies.synthetic import results
from tests.studies.synthetic_others import CHANCE, LENGTHS, add


@pytest.fixture(scope="module")
def record():
    return add(results(schemes=("rope", "window", "alibi")))


def test_accuracy_is_recipe_b_over_seeds_and_haystacks(record):
    found = read_other(read_study(record), "passkey", ())
    shares = np.array(
        [
            next(c for c in cell["evaluations"]["passkey"]["cells"] if c["length"] == 256)[
                "unit_accuracy"
            ]
            for cell in record["cells"]
            if cell["axes"]["scheme"] == "window"
        ]
    )
    assert shares.shape == (3, 20)
    # rope, rope + yarn, window, alibi and the failed kerple, at four lengths
    one = found.get("window", "accuracy", 256)
    assert one.interval.family == 5 * len(LENGTHS)
    parts = [(shares.mean(1).var(ddof=1) / 3, 2), (shares.mean(0).var(ddof=1) / 20, 19)]
    total = sum(v for v, _ in parts)
    df = 1 / sum((v / total) ** (4 / 3) / n for v, n in parts)  # of a family
    half = stats.t.ppf(1 - 0.05 / 20 / 2, df) * math.sqrt(total)
    assert one.value == pytest.approx(shares.mean()) and one.half == pytest.approx(half)
    assert found.value("window", "exact", 256) == pytest.approx(shares.mean() / 2)
    assert one.verdict == "above chance"
    assert found.get("rope", "accuracy", 1024).verdict == "not shown above chance"


def test_methods_are_variants_and_depths_are_means_over_seeds(record):
    found = read_other(read_study(record), "passkey", ())
    assert found.names == ["rope", "rope + yarn", "window", "alibi"]
    for depth, share in ((0.0, 0.8 * 0.8), (1.0, 0.8)):
        assert found.value("alibi", "accuracy_at_depth", 1024, (depth,)) == pytest.approx(share)


def test_fewer_than_three_seeds_have_no_task_claims():
    found = read_other(read_study(add(results(seeds=2, schemes=("rope", "window")))), "passkey", ())
    assert {row.verdict for row in found.select("accuracy")} == {"points only"}


def test_results_on_different_items_are_excluded():
    record = add(results(schemes=("rope", "window")))
    cell = next(c for c in record["cells"] if c["id"] == "scheme=window,seed=1")
    cell["evaluations"]["passkey"]["items_hash"] = "ff" * 32
    found = read_other(read_study(record), "passkey", ())
    seeds = [found.get(name, "accuracy", 256).interval.seeds for name in ("window", "rope")]
    assert seeds == [(2,), (3,)]


def test_attention_is_the_mean_over_layers_heads_and_seeds(record):
    found = read_other(read_study(record), "attention", ())
    values = [
        row["value"]
        for cell in record["cells"]
        if cell["axes"]["scheme"] == "rope"
        for row in cell["evaluations"]["attention"]["cells"]
        if (row["method"], row["length"], row["measure"], row["layer"])
        == ("yarn", 512, "logit_std", None)
    ]
    assert len(values) == 3
    assert found.value("rope + yarn", "logit_std", 512) == pytest.approx(np.mean(values))
    assert min(row.value for row in found.rows.values()) > -1  # no single layer among them
    assert {row.length for row in found.rows.values()} == {256, 512, 1024}


def test_attention_table_shows_the_first_and_last_length(record):
    found = read_other(read_study(record), "attention", ())
    table = tables.attention(found)
    assert table.title == "Attention at 256 → 1,024 tokens"
    row = dict(zip(table.columns, next(row for row in table.rows if row[0] == "rope"), strict=True))
    ends = [found.value("rope", "logit_max", n) for n in (256, 1024)]
    assert row["largest logit"] == f"{ends[0]:.3g} → {ends[1]:.3g}"


def test_loss_evaluations_are_not_read_as_others(record):
    assert read_other(read_study(record), "long", ()) is None
    assert read_other(read_study(record), "nowhere", ()) is None


def test_the_report_has_a_section_and_figures_for_each(record, vector_figures, tmp_path):
    files = {file.name for file in write_report(record, tmp_path)}
    drawn = ("passkey_accuracy", "passkey_depth", "attention_attention", "position_by_position")
    assert {f"{name}.svg" for name in drawn} <= files
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for title in (
        "Task: passkey",
        "Attention beyond the trained length",
        "Generated text beyond",
        "NLL by position",
    ):
        assert f"## {title}" in text
    assert "above chance up to 512" in text and "**alibi**: accuracy 90%" in text
    assert "| rope | greedy | 50% → 70% | 2.00 → 4.00 | 128–256 → 512–1,024 |" in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    # Words in the cells of a heat map keep their color on a dark page, as the cells do.
    assert "fill: #111111" in page and "fill: #fefefe" in page


def test_accuracies_significantly_above_chance_are_shaded(record):
    found = read_other(read_study(record), "passkey", ())
    del found.rows["alibi", "accuracy", LENGTHS[-1], (), ""]
    table = tables.accuracy(found)
    tones = set()
    for variant, *cells in table.rows:
        for length, cell in zip(LENGTHS, cells, strict=True):
            one = found.get(variant, "accuracy", length)
            above = one is not None and one.low > CHANCE
            assert cell.tone == ("faint" if one is None else "held" if above else "")
            tones.add(cell.tone)
    assert tones == {"held", "faint", ""}
    assert f"alibi {100 * found.value('alibi', 'exact', LENGTHS[0]):.0f}%" in table.note
