"""The long table, the tables and the figures of each kind of evaluation have the measured numbers."""

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from evaluation.diagnostics.generation import REAL
from evaluation.reports import attention_report, generation_report
from evaluation.reports.comparison_report import comparison_report
from evaluation.reports.document import ReportTable
from evaluation.reports.loss_report import loss_report
from evaluation.reports.reported_results import ReportedResults
from evaluation.reports.task_report import task_report
from evaluation.statistics.analysis import analyze
from evaluation.tasks.task_analysis import analyse_tasks
from tests.artists import close, dashed, ends, labelled, levels, named, shown
from tests.evaluation.tasks.test_session import answered, retriever


def half_width(differences, alpha=0.05):
    """Of the t interval of the mean over units."""
    quantile = stats.t.ppf(1 - alpha / 2, len(differences) - 1)
    return quantile * np.std(differences, ddof=1) / math.sqrt(len(differences))


def by_unit(result, values, inside=slice(None)):
    unit = result.unit[inside]
    return [values[inside][unit == one].mean() for one in np.unique(unit)]


def texts(table: ReportTable) -> dict[str, dict[str, str]]:
    """The cells of a table by the first column and the heading."""
    rows = [[cell.text for cell in row] for row in table.cells]
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in rows}


def interval(values, half) -> str:
    ends = f"{np.mean(values):+.3f} [{np.mean(values) - half:+.3f}, {np.mean(values) + half:+.3f}]"
    return ends.replace("-", "−").replace("+0.000", "0.000").replace("−0.000", "0.000")


NAMES = {"trained": "as trained", "yarn": "yarn", "window": "window"}


def test_loss_report_shows_levels_and_gains_with_their_intervals(do):
    result = do()
    report = loss_report(result, analyze(result))
    (figure,) = report.figures.values()
    axes, below = figure.axes
    by_name = {name.removesuffix(" †"): own for name, own in named(axes).items()}
    cut = "context truncated to 16"
    assert set(by_name) == {*NAMES.values(), cut}
    overview = texts(report.tables[0])
    (gains,) = [texts(table) for table in report.more_tables if "shorter" in table.title]
    for method, name in NAMES.items():
        row = overview[f"{name} †" if method == "trained" else name]  # random weights
        means = [result.nll[method, n].mean() for n in (16, 32, 64)]
        close(by_name[name].points, (16, 32, 64), means)
        assert not by_name[name].bars  # a bar on a level would be read as that of the level
        assert [row[column] for column in ("16", "32", "64")] == [f"{nll:.3f}" for nll in means]
        color = next(end.color for end in ends(axes) if end.name.startswith(name))
        drawn = shown(below, color)
        for (x, y), n in zip(drawn.points, (32, 64), strict=True):
            gain = by_unit(result, result.truncated - result.nll[method, n])
            half = half_width(gain, alpha=0.05 / 6)
            assert (x, y) == (n, pytest.approx(np.mean(gain)))
            assert drawn.bars[n] == pytest.approx((y - half, y + half))
            text = row["net gain at 64"] if n == 64 else gains[name]["32"]
            assert text.endswith(interval(gain, half))
    assert levels(axes) == [pytest.approx(result.truncated.mean())] and levels(below) == [0]
    notes = figure.texts[-1].get_text(), figure.texts[1].get_text()
    assert "95%" in notes[0] and "simultaneous over 6" in notes[0]
    assert "the same 70 targets of 7 documents at every length" in notes[1]


def test_each_number_is_printed_once(do):
    result = do()
    report = loss_report(result, analyze(result))
    tables = [report.tables[0], *report.more_tables]
    cells = [cell.text for table in tables for row in table.cells for cell in row[1:]]
    gains = [text for text in cells if "[" in text]
    assert len(gains) == 6 and len(set(gains)) == len(gains)
    sentences = " ".join(report.summary)
    assert not [text for text in cells if text.count(".") and text in sentences]


def test_results_file_has_a_row_for_each_number(do, tmp_path):
    result = do()
    report = loss_report(result, analyze(result))
    report.write(tmp_path)
    rows = pd.read_csv(tmp_path / "results.csv")
    assert len(rows) == len(report.results.table.rows)
    cells = {(cell["method"], cell["length"]): cell for cell in report.record["cells"]}
    for metric in ("nll", "perplexity", "bits_per_byte", "delta", "gain", "gain_per_doubling"):
        own = rows[rows.metric == metric]
        stored = {key: cell for key, cell in cells.items() if cell[metric] is not None}
        assert {(row.method, row.length) for row in own.itertuples()} == set(stored)
        for row in own.itertuples():
            cell = stored[row.method, row.length]
            assert row.value == cell[metric]
            if f"{metric}_low" in cell:
                assert (row.low, row.high) == (cell[f"{metric}_low"], cell[f"{metric}_high"])
    delta = rows[rows.metric == "delta"]
    assert [cells[row.method, row.length]["verdict"] for row in delta.itertuples()] == [
        *delta.verdict
    ]
    sample = delta[["family", "units", "level"]].drop_duplicates().to_numpy().tolist()
    assert sample == [[6, 7, 0.95]]
    for row in rows[rows.metric == "context_reach"].itertuples():
        (reach,) = [r for r in report.record["context_reach"] if r["method"] == row.method]
        assert (row.note, reach["reach"]) == (reach["text"], row.value if row.value > 0 else None)
    assert set(rows.targets_hash) == {result.plan.hash}
    notes = rows[(rows.metric == "nll") & (rows.method == "yarn") & (rows.length == 64)].note
    assert notes.tolist() == ["rope, yarn factor 4 (auto)"]


def test_parts_of_the_units_are_reported_at_the_longest_length(do, make_store):
    names = [f"author {i // 2}" for i in range(14)] + ["known"] * 2
    store = make_store([75 + 3 * i for i in range(16)], seed=1, clusters=names)
    train = make_store([300, 40], seed=2, clusters=["known", "author 3"])
    report = loss_report(result := do(store=store, train=train), analyze(result))
    (table,) = [table for table in report.more_tables if "training text" in table.title]
    unit = np.repeat(np.arange(8), 20)
    gain = (result.truncated - result.nll["yarn", 64]).reshape(16, 10)
    by_author = gain.reshape(8, 20).mean(axis=1)
    seen = np.isin(np.unique(unit), [3, 7])
    row = texts(table)["yarn"]
    assert row["not in the training text"] == interval(
        by_author[~seen], half_width(by_author[~seen])
    )
    assert row["in the training text"] == f"{by_author[seen].mean():+.3f}".replace("-", "−")


def test_position_report_shows_buckets_and_gains(do):
    result = do(protocol="by-position")
    report = loss_report(result, analyze(result))
    (figure,) = report.figures.values()
    axes, below = figure.axes
    at = result.plan.windows[64].target_positions()
    by_name = {name.removesuffix(" †"): own for name, own in named(axes).items()}
    edges = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    x = [math.sqrt((low + 1) * high) for low, high in edges]
    tables = [texts(table) for table in (*report.tables, *report.more_tables)]
    for method, name in NAMES.items():
        nll = result.nll[method, 64]
        inside = [(at >= low) & (at < high) for low, high in edges]
        close(by_name[name].points, x, [nll[mask].mean() for mask in inside])
        gains = [by_unit(result, result.truncated - nll, mask) for mask in inside]
        drawn = shown(below, next(end.color for end in ends(axes) if end.name.startswith(name)))
        close(drawn.points, x, [np.mean(gain) for gain in gains])
        for place, gain in zip(x, gains, strict=True):
            if half_width(gain) > 1e-9:
                low, high = drawn.bars[place]
                assert (high - low) / 2 == pytest.approx(half_width(gain))
        assert tables[0]["32–63"][name] == f"{nll[inside[-1]].mean():.3f}"
        assert tables[1]["32–63"][name] == interval(gains[-1], half_width(gains[-1]))
    assert "the same" not in figure.texts[1].get_text() and not dashed(axes)
    assert report.verdict.startswith("Gain over truncation from position 32 on: ")


def test_runs_are_compared_by_differences_in_a_panel_and_a_table(do):
    results = [do(), do()]
    report = comparison_report(["first", "second"], results, "c", {})
    axes, below = report.figures["nll_by_length"].axes
    overview, differences = map(texts, report.tables)
    rows = report.results.table.select("difference")
    for run, method in (("first", "yarn"), ("second", "trained"), ("second", "window")):
        label = run if method == "trained" else f"{run}, {method}"
        color = next(end.color for end in ends(axes) if end.name.split(" †")[0] == label)
        own = [row for row in rows if row.variant == label]
        assert [row.length for row in own] == [16, 32, 64]
        drawn = shown(below, color)
        close(drawn.points, (16, 32, 64), [row.value for row in own])
        for row in own:
            change = results[0].nll[method, row.length] - results[0].nll["trained", row.length]
            change = by_unit(results[0], change)
            half = half_width(change, alpha=0.05 / len(rows))
            assert (row.value, row.high) == pytest.approx((np.mean(change), np.mean(change) + half))
            assert differences[label][str(row.length)] == interval(change, half)
            if row.high > row.low:
                assert drawn.bars[row.length] == pytest.approx((row.low, row.high))
    assert not any(named(axes)[end.name].bars for end in ends(axes))
    assert overview["first †"]["64"] == f"{results[0].nll['trained', 64].mean():.3f}"
    assert {row.family for row in rows} == {len(rows)} == {20}


def test_task_report_shows_accuracies_by_length_and_place(tmp_path):
    result = answered(retriever, tmp_path, items=42, haystacks=7)
    analysis = analyse_tasks(result)
    report = task_report(result, analysis)
    axes = report.figures["accuracy_by_length"].axes[0]
    by_name = named(axes)
    (table, *_) = report.tables
    cells = {(row[0].text, row[1].text): row[2] for row in table.cells}
    for method, name in (("trained", "as trained"), ("truncate", "truncate")):
        rows = [row for row in analysis.rows if row.method == method]
        right = [result.answers[method, row.length].right.mean() for row in rows]
        close(by_name[name].points, (100, 200), right)
        exact = [result.answers[method, row.length].exact.mean() for row in rows]
        close(*by_name[name].thin, (100, 200), exact)
        for row, share in zip(rows, right, strict=True):
            if row.high > row.low:
                assert by_name[name].bars[row.length] == pytest.approx((row.low, row.high))
            cell = cells[name, str(row.length)]
            ends_text = f"[{row.low:.1%}, {row.high:.1%}]"
            assert cell.text.startswith(f"{share:.1%} {ends_text}")
            assert (cell.tone == "held") == (row.low > 1 / 3)
    assert levels(axes) == [pytest.approx(1 / 3)]
    assert [end.value for end in ends(axes)] == ["100%", f"{right[1]:.0%}", "33.3%"]
    for method in ("trained", "truncate"):
        grids = report.figures[f"accuracy_by_depth_{method}"].axes
        for axes, spots in zip(grids, (analysis.by_depth, analysis.by_distance), strict=True):
            own = [spot for spot in spots if spot.method == method]
            shares = [f"{100 * spot.share.share:.0f}" for spot in own]
            printed = [text.get_text() for text in axes.texts]
            assert printed[::2] == shares
            names = {
                s.where: f"{s.where:.2f}" if s.until is None else f"{s.where}–{s.until - 1}"
                for s in own
            }
            rows = [text.get_text() for text in axes.get_yticklabels()]
            assert rows == [names[where] for where in sorted(names)]
    assert report.verdict == "Above chance (33.3%) at 200 tokens: as trained, truncate."


def attention_record(rng) -> dict:
    """Random measures of two methods at three lengths, two layers, two heads."""
    measures = [*attention_report.SHOWN]
    edges = [0, 1, 2, 4, 8]
    cells = []
    by_distance = []
    for method in ("trained", "yarn"):
        for length in (8, 16, 32):
            for layer, head in attention_report.places(2, 2):
                place = {"method": method, "length": length, "layer": layer, "head": head}
                for measure in measures:
                    cells.append({**place, "measure": measure, "value": rng.uniform(0.1, 0.9)})
                masses = {"mass": rng.uniform(size=4), "uniform": rng.uniform(size=4)}
                by_distance.append({**place, "edges": edges, **masses})
    pairs = [
        {"method": "yarn", "length": 32, "pair": n, "kind": "full", "wavelength": wavelength}
        for n, wavelength in enumerate((6.0, 60.0, None))
    ]
    return {
        "cells": cells,
        "by_distance": by_distance,
        "pairs": pairs,
        "layer_kinds": ["full", "full"],
        "trained_length": 8,
        "documents": 3,
    }


def compare(axes, expected: dict[str, list], x) -> None:
    by_name = labelled(axes)
    assert set(by_name) == set(expected)
    for name, values in expected.items():
        close(by_name[name], x, values)


def test_attention_report_shows_means_layers_heads_and_distances():
    record = attention_record(np.random.default_rng(0))
    names = ["as trained", "yarn"]
    table = attention_report.attention_rows(record)
    r = ReportedResults(title="$run$", names=names, facts=record, table=table)
    lengths = (8, 16, 32)

    def values(method, measure, layer, head=None) -> list[float]:
        place = {"method": method, "measure": measure, "layer": layer, "head": head}
        return [c["value"] for c in record["cells"] if all(c[k] == v for k, v in place.items())]

    styles = attention_report.styles_of(names)
    by_method = attention_report.attention_figure(r, styles)
    figures = attention_report.figures_of(r, "yarn")
    for n, measure in enumerate(attention_report.DRAWN):
        means = {"as trained": values("trained", measure, None)}
        compare(by_method.axes[n], means | {"yarn": values("yarn", measure, None)}, lengths)
        layers = {f"layer {k + 1}": values("yarn", measure, k) for k in (0, 1)}
        mean = {"mean": values("yarn", measure, None)}
        compare(figures["attention_by_length"].axes[n], layers | mean, lengths)
    middles = [math.sqrt((low + 1) * high) for low, high in pairwise([0, 1, 2, 4, 8])]
    for layer, axes in enumerate(figures["mass_by_distance"].axes):
        own = {
            row["length"]: row
            for row in record["by_distance"]
            if (row["method"], row["layer"], row["head"]) == ("yarn", layer, None)
        }
        mass = {f"{length} tokens": own[length]["mass"] for length in lengths}
        compare(axes, mass | {"uniform attention": own[32]["uniform"]}, middles)
        assert axes.get_xlim()[1] > 32  # the longest bucket is inside
    for layer, axes in enumerate(figures["reach_of_heads"].axes):
        heads = {f"head {n + 1}": values("yarn", "reach_90", layer, n) for n in (0, 1)}
        compare(axes, heads | {"uniform attention": [0.9 * n for n in lengths]}, lengths)
    printed = texts(attention_report.attention_tables(r)[0])
    assert printed["yarn"]["logit sd"] == f"{values('yarn', 'logit_std', None)[-1]:.2f}"
    (axes,) = attention_report.pairs_figure(r).axes
    assert levels(axes) == [8] and [end.name for end in ends(axes)] == ["yarn"]


def test_generation_report_shows_means_by_source_and_position():
    rng = np.random.default_rng(1)
    sources = ["greedy", "temperature 1", REAL]
    cells = [
        {"method": "trained", "source": source, "measure": measure, "value": rng.uniform()}
        | {"start": start, "stop": start + 8}
        for source in sources
        for measure in generation_report.DRAWN
        for start in (8, 16)
    ]
    record = {"cells": cells, "edges": [8, 16, 24], "trained_length": 8, "prompts": 6}
    table = generation_report.generation_rows(record)
    r = ReportedResults(title="run", names=["as trained"], facts=record, table=table)
    figure = generation_report.source_figure(r, "as trained", sources)
    for axes, measure in zip(figure.axes, generation_report.DRAWN, strict=True):
        expected = {
            source: [c["value"] for c in cells if (c["source"], c["measure"]) == (source, measure)]
            for source in sources
        }
        compare(axes, expected, [12, 20])
        assert axes.get_xlim()[0] < 8 and axes.get_xlim()[1] > 24
    (printed,) = generation_report.generation_tables(r)
    value = next(c["value"] for c in cells if c["measure"] == "nll")
    assert [cell.text for cell in printed.cells[0]][:3] == ["as trained", "greedy", "8–15"]
    assert printed.cells[0][-1].text == f"{value:.2f}"
