"""Tables, sentences and figures of each kind of evaluation are views of its long table, and
results.csv is that table. Other tests compute the numbers by hand."""

import math
from itertools import pairwise, product

import numpy as np
import pandas as pd
import pytest

from evaluation.diagnostics.generation import REAL
from evaluation.reports import diagnostic_report
from evaluation.reports.document import ReportTable
from evaluation.reports.loss_report import loss_report
from evaluation.reports.position_report import tokens_seen
from evaluation.reports.reported_results import ReportedResults, method_variants
from evaluation.reports.task_report import task_report
from evaluation.results_table import ResultsTable
from evaluation.statistics.analysis import analyze
from evaluation.tasks.task_analysis import analyse_tasks
from tests.artists import assert_shows, close, labelled, levels, named
from tests.evaluation.tasks.test_session import answered, retriever


def texts(table: ReportTable) -> dict[str, dict[str, str]]:
    """The cells of a table by the first column and the heading."""
    rows = [[cell.text.removesuffix(" †") for cell in row] for row in table.cells]
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in rows}


def interval(row) -> str:
    text = f"{row.value:+.3f} [{row.low:+.3f}, {row.high:+.3f}]".replace("-", "−")
    return text.replace("+0.000", "0.000").replace("−0.000", "0.000")


def of(report, metric):
    return report.results.table.select(metric)


def test_loss_report_shows_levels_and_gains(do):
    result = do()
    report = loss_report(result, analyze(result))
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
        if row.length == 64:
            assert overview[row.variant]["net gain at 64"] == interval(row)
        else:
            assert row.verdict in shorter[row.variant]["32"]
            assert shorter[row.variant]["32"].endswith(interval(row))
    assert overview["truncate"]["verdict"] == "flat by construction"
    assert "the same 70 targets of 7 documents at every length" in axes.figure.texts[1].get_text()
    assert "simultaneous over 6" in axes.figure.texts[2].get_text()


def test_results_file_has_a_row_for_each_number(do, tmp_path):
    result = do()
    report = loss_report(result, analyze(result))
    report.write(tmp_path)
    rows = pd.read_csv(tmp_path / "results.csv")
    assert len(rows) == len(report.results.table.rows)
    assert set(rows.targets_hash) == {result.plan.hash}
    for cell in report.results.facts["cells"]:
        own = rows.query(f"method == '{cell['method']}' and length == {cell['length']}")
        own = own.set_index("metric")
        assert own.value["nll"] == cell["nll"]
        assert own.low["gain"] == cell["gain_low"]
        if cell["verdict"]:
            delta = own.loc["delta"]
            assert (delta.verdict, delta.high) == (cell["verdict"], cell["delta_high"])
            assert (delta.family, delta.units, delta.level) == (6, 7, 0.95)
    (note,) = rows.query("metric == 'nll' and method == 'yarn' and length == 64").note
    assert note == "rope, yarn factor 4 (auto)"


def test_position_report_shows_buckets_and_gains(do):
    """The buckets are [2^k, 2^(k+1)), and gains are paired by unit."""
    result = do(protocol="by-position")
    report = loss_report(result, analyze(result))
    axes, below = report.figures["nll_by_position"].axes
    losses = of(report, "nll_at_positions")
    gains = of(report, "gain_at_positions")
    assert_shows(axes, losses, place=tokens_seen)
    assert_shows(below, gains, names=axes, place=tokens_seen)
    assert tokens_seen(gains[-1]) == pytest.approx(math.sqrt(33 * 64))  # positions 32 to 63
    nll, gain = (texts(table)["32–63"] for table in report.tables)
    assert gain[gains[-1].variant] == interval(gains[-1])
    (windows,) = result.plan.windows.values()
    position = windows.target_positions()[result.screening.kept]
    for row, of_gain in zip(losses, gains, strict=True):
        here = (position >= row.at) & (position < row.until)
        method = "trained" if row.variant == "as trained" else row.variant
        own = result.nll[method, 64]
        assert row.value == pytest.approx(own[here].mean())
        change = (result.truncated - own)[here]
        units = result.unit[here]
        means = [change[units == unit].mean() for unit in np.unique(units)]
        assert of_gain.value == pytest.approx(np.mean(means))
        if row.at == 32:
            assert nll[row.variant] == f"{row.value:.3f}"
    assert {row.at for row in losses} == {0, 1, 2, 4, 8, 16, 32}


def test_task_report_shows_accuracies_by_length_and_place(tmp_path):
    result = answered(retriever, tmp_path, items=42, haystacks=7)
    analysis = analyse_tasks(result)
    report = task_report(result, analysis)
    axes = report.figures["accuracy_by_length"].axes[0]
    rows = of(report, "accuracy")
    assert_shows(axes, rows)
    for name in ("as trained", "truncate"):
        exact = [row.value for row in of(report, "exact") if row.variant == name]
        close(*named(axes)[name].thin, (100, 200), exact)
    assert levels(axes) == [pytest.approx(1 / 3)]
    cells = {(row[0].text, row[1].text): row[2] for row in report.tables[0].cells}
    for row, stored in zip(rows, analysis.rows, strict=True):
        assert (row.value, row.low) == (stored["accuracy"], stored["accuracy_low"])
        cell = cells[row.variant, str(row.length)]
        assert cell.text.startswith(f"{row.value:.1%} [{row.low:.1%}, {row.high:.1%}]")
        assert (cell.tone == "good") == (row.low > 1 / 3)
    grids = report.figures["accuracy_by_depth_trained"].axes
    for grid, spots in zip(grids, (analysis.by_depth, analysis.by_distance), strict=True):
        own = [spot for spot in spots if spot["method"] == "trained"]
        printed = [text.get_text().split("\n")[0] for text in grid.texts]
        assert printed == [f"{100 * s['share']['share']:.0f}" for s in own]
        names = {
            s["where"]: f"{s['where']}–{s['until'] - 1}" if s["until"] else f"{s['where']:.2f}"
            for s in own
        }
        found = [text.get_text() for text in grid.get_yticklabels()]
        assert found == [names[where] for where in sorted(names)]
    assert report.verdict == "Above chance (33.3%) at 200 tokens: as trained, truncate."


def results_of(record: dict, rows, methods: list[str]) -> ReportedResults:
    table = ResultsTable(rows(record))
    variants = method_variants(methods)
    return ReportedResults(title="$run$", variants=variants, facts=record, table=table)


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
    r = results_of(record, diagnostic_report.attention_rows, ["trained", "yarn"])
    stored = [c for c in cells if (c["method"], c["measure"]) == ("yarn", "logit_std")]
    for where, layer, head in (("", None, None), ("layer 2", 1, None), ("layer 1, head 2", 0, 1)):
        values = [c["value"] for c in stored if (c["layer"], c["head"]) == (layer, head)]
        assert [row.value for row in r.table.select("logit_std", "yarn", where=where)] == values
    figures = diagnostic_report.attention_figures(r)
    for n, measure in enumerate(diagnostic_report.ATTENTION):
        assert_shows(figures["attention_by_method"].axes[n], r.table.select(measure))
        layers = [
            row._replace(variant=where or "mean")
            for where in ("", "layer 1", "layer 2")
            for row in r.table.select(measure, "yarn", where=where)
        ]
        assert_shows(figures["attention_by_length-yarn"].axes[n], layers)
    middles = [math.sqrt((low + 1) * high) for low, high in pairwise([0, 1, 2, 4, 8])]
    own = [row for row in by_distance if (row["method"], row["layer"]) == ("yarn", 1)]
    drawn = {f"{row['length']} tokens": row["mass"] for row in own if row["head"] is None}
    lines = labelled(figures["mass_by_distance-yarn"].axes[1])
    for name, expected in drawn.items():
        close(lines[name], middles, expected)
    (printed,) = map(texts, diagnostic_report.attention_tables(r))
    assert printed["yarn"]["sd of logits"] == f"{r.table.value('yarn', 'logit_std', 32):.2f}"


def test_generation_report_shows_means_by_source_and_position():
    rng = np.random.default_rng(1)
    sources = ["greedy", "temperature 1", REAL]
    cells = [
        {"method": "trained", "source": source, "measure": measure, "value": rng.uniform()}
        | {"start": start, "stop": start + 8}
        for source in sources
        for measure in diagnostic_report.TEXT
        for start in (8, 16)
    ]
    record = {"cells": cells, "edges": [8, 16, 24], "trained_length": 8, "prompts": 6}
    r = results_of(record, diagnostic_report.flat_rows, ["trained"])
    assert [row.value for row in r.table.rows.values()] == [cell["value"] for cell in cells]
    figure = diagnostic_report.source_figure(r, "as trained", sources)
    for axes, measure in zip(figure.axes, diagnostic_report.TEXT, strict=True):
        rows = [row._replace(variant=row.where) for row in r.table.select(measure, where=None)]
        assert_shows(axes, rows, place=lambda row: {8: 12, 16: 20}[row.at])
        assert axes.get_xlim()[0] < 8
        assert axes.get_xlim()[1] > 24
    (printed,) = diagnostic_report.generation_tables(r)
    first = [cell.text for cell in printed.cells[0]]
    value = next(cell["value"] for cell in cells if cell["measure"] == "nll")
    assert first[:3] == ["as trained", "greedy", "8–15"]
    assert first[-1] == f"{value:.2f}"
