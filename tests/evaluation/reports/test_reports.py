"""Tables, sentences and figures of each kind of evaluation are views of its long table, and
results.csv is that table. Other tests compute the numbers by hand."""

import math
from itertools import pairwise, product

import numpy as np
import pandas as pd
import pytest

from evaluation.reports import diagnostic_report
from evaluation.reports.document import ReportTable
from evaluation.reports.loss_report import loss_report, tokens_seen
from evaluation.reports.report import ReportedResults, method_variants
from evaluation.reports.task_report import task_report
from evaluation.results_table import results_table
from evaluation.scoring.methods import name_of
from evaluation.tasks.task_analysis import analyse_tasks
from tests.artists import assert_shows, close, labelled, levels, named
from tests.evaluation.tasks.test_session import answered, retriever
from tests.tables import find, value


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
    assert levels(axes) == [pytest.approx(result.truncated.mean())]
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
    assert len(rows) == len(report.results.table)
    assert set(rows.targets_hash) == {result.plan.hash}
    table = report.results.table
    for cell in report.results.facts["cells"]:
        own = rows.query(f"method == '{cell['method']}' and length == {cell['length']}")
        own = own.set_index("metric")
        place = (name_of(cell["method"]), "delta", cell["length"])
        assert own.value["nll"] == cell["nll"]
        if expected := find(table, *place):
            delta = own.loc["delta"].fillna("")
            assert delta.verdict == expected.verdict
            # The CSV reader of pandas 2 can be off by a bit.
            assert delta.high == pytest.approx(expected.high, rel=1e-15)
            assert (delta.family, delta.units, delta.level) == (6, 7, 0.95)


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
        change = (result.truncated - own)[here]
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


def test_attention_report_shows_means_layers_heads_and_distances():
    """Random measures of two methods at three lengths, two layers, two heads."""
    rng = np.random.default_rng(0)
    cells = []
    by_distance = []
    places = [(None, None), (0, None), (0, 0), (0, 1), (1, None), (1, 0), (1, 1)]
    for method, length, (layer, head) in product(("trained", "yarn"), (8, 16, 32), places):
        place = {"method": method, "length": length, "layer": layer, "head": head}
        for measure in diagnostic_report.ATTENTION:
            cells.append({**place, "measure": measure, "value": rng.uniform(0.1, 0.9)})
        masses = {"mass": rng.uniform(size=4), "uniform": rng.uniform(size=4)}
        by_distance.append({**place, "edges": [0, 1, 2, 4, 8], **masses})
    record = {
        "cells": cells,
        "by_distance": by_distance,
        "layer_kinds": ["full", "full"],
        "trained_length": 8,
        "documents": 3,
    }
    table = results_table(diagnostic_report.attention_rows(record))
    variants = method_variants(["trained", "yarn"])
    r = ReportedResults(title="$run$", variants=variants, facts=record, table=table)
    for where, layer, head in (
        ("", None, None),
        ("layer 2", 1, None),
        ("layer 1, head 2", 0, 1),
    ):
        place = {"method": "yarn", "measure": "logit_std", "layer": layer, "head": head}
        values = [cell["value"] for cell in cells if place.items() <= cell.items()]
        assert [row.value for row in r.rows("logit_std", "yarn", where=where)] == values
    figures = diagnostic_report.attention_figures(r)
    for n, measure in enumerate(diagnostic_report.ATTENTION):
        assert_shows(figures["attention_by_method"].axes[n], r.rows(measure))
        layers = [
            row._replace(variant=where or "mean")
            for where in ("", "layer 1", "layer 2")
            for row in r.rows(measure, "yarn", where=where)
        ]
        assert_shows(figures["attention_by_length-yarn"].axes[n], layers)
    middles = [math.sqrt((low + 1) * high) for low, high in pairwise([0, 1, 2, 4, 8])]
    lines = labelled(figures["mass_by_distance-yarn"].axes[1])
    place = {"method": "yarn", "layer": 1, "head": None}
    for row in by_distance:
        if place.items() <= row.items():
            close(lines[f"{row['length']} tokens"], middles, row["mass"])
    (printed,) = map(texts, diagnostic_report.attention_tables(r))
    assert printed["yarn"]["sd of logits"] == f"{value(r.table, 'yarn', 'logit_std', 32):.2f}"
