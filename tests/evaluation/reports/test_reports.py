"""Tables, sentences and figures of each kind of evaluation are views of its long table, and
results.csv is that table. Other tests compute the numbers by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from evaluation.reports.document import ReportTable
from evaluation.reports.loss_report import loss_report, tokens_seen
from evaluation.reports.task_report import task_report
from evaluation.tasks.task_analysis import analyse_tasks
from tests.artists import assert_shows, close, levels, named
from tests.evaluation.tasks.test_session import answered, retriever


def texts(table: ReportTable) -> dict[str, dict[str, str]]:
    """The cells of a table by the first column and the heading."""
    rows = [[cell.text.removesuffix(" †") for cell in row] for row in table.cells]
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in rows}


def interval(row) -> str:
    text = f"{row.value:+.3f} [{row.low:+.3f}, {row.high:+.3f}]".replace("-", "−")
    return text.replace("+0.000", "0.000").replace("−0.000", "0.000")


def of(report, metric):
    return report.results.rows(metric)


def test_loss_report_shows_levels_and_gains(do):
    result = do()
    report = loss_report({"run": result})
    axes, below = report.figures["nll_by_length"].axes
    losses = [row for row in of(report, "nll") if row.variant != "truncate"]
    assert_shows(axes, [row._replace(low=0, high=0) for row in losses])
    gains = [row.negated for row in of(report, "delta") if row.verdict]
    assert_shows(below, gains, names=axes)
    assert levels(axes) == [pytest.approx(result.truncated_nll.mean())]
    assert levels(below) == [0]
    overview, _, shorter = map(texts, (*report.tables, *report.more_tables))
    for row in losses:
        assert overview[row.variant][str(row.length)] == f"{row.value:.3f}"
    for row in gains:
        cell = (
            overview[row.variant]["net gain at 64"]
            if row.length == 64
            else shorter[row.variant]["32"]
        )
        assert cell.endswith(interval(row))


def test_results_file_has_a_row_for_each_number(do, tmp_path):
    result = do()
    report = loss_report({"run": result})
    report.write(tmp_path)
    rows = pd.read_csv(tmp_path / "results.csv")
    table = report.results.table
    assert rows.metric.tolist() == table.metric.tolist()
    # The CSV reader of pandas 2 can be off by a bit.
    for column in ("value", "low", "high"):
        assert rows[column].tolist() == pytest.approx(table[column], rel=1e-15, nan_ok=True)
    assert set(rows.targets_hash) == {result.plan.hash}
    delta = rows[rows.metric == "delta"]
    assert (set(delta.family), set(delta.units), set(delta.level)) == ({6}, {7}, {0.95})
    nll = rows[rows.metric == "nll"].set_index(["method", "length"]).value
    for cell in report.results.record["cells"]:
        assert nll[cell["method"], cell["length"]] == pytest.approx(cell["nll"], rel=1e-15)


@pytest.mark.parametrize("longest", [64, 50])
def test_position_report_shows_buckets_and_gains(do, longest):
    """The buckets are [2^k, 2^(k+1)) up to the last position, and gains are paired by unit."""
    result = do(protocol="by-position", lengths=[longest])
    report = loss_report({"run": result})
    axes, below = report.figures["nll_by_position"].axes
    losses = of(report, "nll_at_positions")
    gains = of(report, "gain_at_positions")
    assert_shows(axes, losses, place=tokens_seen)
    assert_shows(below, gains, names=axes, place=tokens_seen)
    assert tokens_seen(gains[-1]) == pytest.approx(math.sqrt(33 * longest))  # positions from 32
    (windows,) = result.plan.windows.values()
    position = np.tile(np.arange(windows[0, 2]), len(windows))[result.screening.kept]
    for row, of_gain in zip(losses, gains, strict=True):
        here = (position >= row.at) & (position < row.until)
        method = "trained" if row.variant == "as trained" else row.variant
        own = result.nll[method, longest]
        assert row.value == pytest.approx(own[here].mean())
        change = (result.truncated_nll - own)[here]
        units = result.unit[here]
        means = [change[units == unit].mean() for unit in np.unique(units)]
        assert of_gain.value == pytest.approx(np.mean(means))
    assert {row.at for row in losses} == {0, 1, 2, 4, 8, 16, 32}


def test_task_report_shows_accuracies_by_length_and_place(tmp_path):
    result = answered(retriever, tmp_path, items=42, haystacks=7)
    analysis = analyse_tasks(result)
    report = task_report(result)
    axes = report.figures["accuracy_by_length"].axes[0]
    rows = of(report, "accuracy")
    assert_shows(axes, rows)
    for name in ("as trained", "truncate"):
        exact = [row.value for row in of(report, "exact") if row.variant == name]
        close(*named(axes)[name].thin, (100, 200), exact)
    assert levels(axes) == [pytest.approx(1 / 3)]
    for row, stored, cells in zip(rows, analysis["cells"], report.tables[0].cells, strict=True):
        assert (row.value, row.low) == (stored["accuracy"], stored["accuracy_low"])
        assert cells[2].text.startswith(f"{row.value:.1%} [{row.low:.1%}, {row.high:.1%}]")
        assert (cells[2].tone == "good") == (row.low > 1 / 3)
    (grid,) = report.figures["accuracy_by_depth_trained"].axes
    own = [spot for spot in analysis["by_depth"] if spot["method"] == "trained"]
    printed = {text.get_position(): text.get_text().split("\n")[0] for text in grid.texts}
    lengths, depths = (100, 200), sorted({spot["where"] for spot in own})
    for spot in own:
        place = (lengths.index(spot["length"]), depths.index(spot["where"]))
        assert printed[place] == f"{100 * spot['share']['share']:.0f}"
    assert grid.yaxis_inverted() and len(grid.get_yticklabels()) == len(depths)
    assert report.verdict == "Above chance (33.3%) at 200 tokens: as trained, truncate."
