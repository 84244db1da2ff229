"""Figures of an evaluation show the numbers of its results."""

import math
from itertools import pairwise
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex
from scipy import stats

from evaluation.diagnostics.attention import AttentionResult
from evaluation.diagnostics.attention_weights import bucket_edges
from evaluation.diagnostics.generation import REAL
from evaluation.reports import attention_report, generation_report
from evaluation.reports.charts import INK, decimals
from evaluation.reports.comparison_report import RunComparison
from evaluation.reports.loss_report import loss_report
from evaluation.reports.task_report import task_report
from evaluation.scoring.methods import Method
from evaluation.statistics.analysis import analyze
from evaluation.tasks.task_analysis import analyse_tasks
from tests.artists import close, dashed, ends, labelled, levels, lines, named, points, shown
from tests.evaluation.tasks.test_session import answered, retriever


def drawn(result):
    """The axes of an evaluation's figure, and its note."""
    (figure,) = loss_report(result, analyze(result)).figures.values()
    return *figure.axes, figure.texts[-1].get_text()


def half_width(differences, alpha=0.05):
    """Of the t interval of the mean over units."""
    return (
        stats.t.ppf(1 - alpha / 2, len(differences) - 1)
        * np.std(differences, ddof=1)
        / math.sqrt(len(differences))
    )


def by_unit(result, values, inside=slice(None)):
    unit = result.unit[inside]
    return [values[inside][unit == one].mean() for one in np.unique(unit)]


def test_nll_by_length_shows_means_and_differences_with_bars(do):
    result = do()
    axes, below, note = drawn(result)
    by_name = named(axes)
    assert set(by_name) == {"as trained", "yarn", "window", "context truncated to 16"}
    means = {"context truncated to 16": result.truncated.mean()}
    for method, name in (("trained", "as trained"), ("yarn", "yarn"), ("window", "window")):
        expected = [(n, result.nll[method, n].mean()) for n in (16, 32, 64)]
        close(by_name[name].points, *zip(*expected, strict=True))
        assert not by_name[name].bars  # a bar on a level would be read as that of the level
        means[name] = expected[-1][1]
        difference = shown(below, next(end.color for end in ends(axes) if end.name == name))
        for (x, y), n in zip(difference.points, (32, 64), strict=True):
            differences = by_unit(result, result.nll[method, n] - result.truncated)
            half = half_width(differences, alpha=0.05 / 6)
            assert (x, y) == (n, pytest.approx(np.mean(differences)))
            assert difference.bars[n] == pytest.approx((y - half, y + half))
    assert levels(axes) == [pytest.approx(result.truncated.mean())] and levels(below) == [0]
    digits = decimals(*axes.get_ylim())
    labels = sorted(means, key=means.__getitem__, reverse=True)
    assert [(end.name, end.value) for end in ends(axes)] == [
        (name, f"{means[name]:.{digits}f}") for name in labels
    ]
    assert "95%" in note and "0.02" in below.get_title(loc="left")
    assert axes.get_axisbelow() is True  # no grid over the lines
    assert "the same 70 targets of 7 documents at every length" in axes.figure.texts[1].get_text()


def test_nll_by_position_shows_buckets_and_truncation(do):
    result = do(protocol="by-position")
    axes, below, _ = drawn(result)
    at = result.plan.windows[64].target_positions()
    by_name = named(axes)
    edges = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    x = [math.sqrt((low + 1) * high) for low, high in edges]
    for method, name in (("yarn", "yarn"), ("window", "window"), ("trained", "as trained")):
        nll = result.nll[method, 64]
        inside = [(at >= low) & (at < high) for low, high in edges]
        points = [nll[mask].mean() for mask in inside]
        gains = [by_unit(result, result.truncated - nll, mask) for mask in inside]
        close(by_name[name].points, x, points)
        drawn_gain = shown(below, next(end.color for end in ends(axes) if end.name == name))
        close(drawn_gain.points, x, [np.mean(gain) for gain in gains])
        half = {one: half_width(gain) for one, gain in zip(x, gains, strict=True)}
        wide = {one for one, width in half.items() if width > 1e-9}
        assert len(wide) >= 2 and wide <= drawn_gain.bars.keys()
        for one in wide:
            low, high = drawn_gain.bars[one]
            assert (high - low) / 2 == pytest.approx(half[one])
    # The last is as trained, whose own gain is what the dashed line lies above it by.
    cut = [mean + np.mean(gain) for mean, gain in zip(points, gains, strict=True)]
    (line,) = dashed(axes)
    close(line, x, cut)
    assert abs(cut[-1] - points[-1]) > 1e-3
    assert by_name["context truncated to 16"].points and {end.name for end in ends(axes)} == set(
        by_name
    )
    assert "the same" not in axes.figure.texts[1].get_text()


def test_runs_are_compared_in_a_panel_of_differences(do):
    names = ["first", "second"]
    results = [do(), do()]
    comparison = RunComparison(names, results)
    axes, below = comparison.figure().axes
    for entry in comparison.entries[1:]:
        color = next(end.color for end in ends(axes) if end.name == entry.label)
        own = {n: each for (other, n), each in comparison.differences.items() if other is entry}
        drawn_here = shown(below, color)
        close(drawn_here.points, list(own), [each.estimate for each in own.values()])
        for n, each in own.items():
            if each.high > each.low:
                assert drawn_here.bars[n] == pytest.approx((each.low, each.high))
    assert not any(named(axes)[end.name].bars for end in ends(axes))


def test_task_figure_shows_accuracies_and_intervals(tmp_path):
    result = answered(retriever, tmp_path, items=42, haystacks=7)
    analysis = analyse_tasks(result)
    figures = task_report(result, analysis).figures
    axes = figures["accuracy_by_length"].axes[0]
    by_name = named(axes)
    for method, name in (("trained", "as trained"), ("truncate", "truncate")):
        rows = [row for row in analysis.rows if row.method == method]
        right = [100 * result.answers[method, row.length].right.mean() for row in rows]
        close(by_name[name].points, (100, 200), right)
        exact = [100 * result.answers[method, row.length].exact.mean() for row in rows]
        close(*by_name[name].thin, (100, 200), exact)
        for row in rows:
            assert by_name[name].bars[row.length] == pytest.approx((100 * row.low, 100 * row.high))
    assert right[1] < 100 and levels(axes) == [pytest.approx(100 / 3)]
    assert [end.value for end in ends(axes)] == ["100%", f"{right[1]:.0f}%", "33%"]
    for method in ("trained", "truncate"):
        for axes, spots in zip(
            figures[f"accuracy_by_depth_{method}"].axes,
            (analysis.by_depth, analysis.by_distance),
            strict=True,
        ):
            spots = [spot for spot in spots if spot.method == method]
            rows = sorted({spot.where for spot in spots})
            cells = [
                (x, rows.index(s.where), s) for s in spots for x in [(100, 200).index(s.length)]
            ]
            assert len(axes.patches) == len(cells) and len(axes.texts) == 2 * len(cells)
            for patch, (x, y, spot) in zip(axes.patches, cells, strict=True):
                box = patch.get_extents().transformed(axes.transData.inverted())
                assert (box.x0, box.x1) == pytest.approx((x, x + 1))
                assert sorted((box.y0, box.y1)) == pytest.approx([y, y + 1])
                assert to_hex(patch.get_facecolor()) == to_hex(
                    colormaps["cividis"](spot.share.share)
                )
                labels = [text.get_text() for text in axes.texts if text.xy == (x + 0.5, y + 0.5)]
                share = spot.share
                assert labels == [
                    f"{100 * share.share:.0f}",
                    f"({100 * share.low:.0f}–{100 * share.high:.0f})",
                ]
            names = {
                s.where: f"{s.where:.2f}" if s.until is None else f"{s.where}–{s.until - 1}"
                for s in spots
            }
            assert [text.get_text() for text in axes.get_yticklabels()] == [
                names[row] for row in rows
            ]


def seen(rng, length):
    """Random measures of 3 windows, 2 layers, 2 heads."""
    edges = bucket_edges(length, 8)
    names = [*attention_report.DRAWN, "reach_90"]
    return SimpleNamespace(
        values={name: torch.tensor(rng.uniform(0.1, 0.9, (3, 2, 2))) for name in names},
        by_distance=torch.tensor(rng.uniform(size=(3, 2, 2, len(edges) - 1))),
        visible=torch.tensor(rng.uniform(size=(2, len(edges) - 1))),
    )


def test_attention_shows_means_over_windows_layers_and_heads():
    rng = np.random.default_rng(0)
    lengths = [8, 16, 32]
    methods = ("trained", "yarn")
    found = SimpleNamespace(
        methods=[Method(method, ()) for method in methods],
        plan=SimpleNamespace(lengths=lengths),
        subject=SimpleNamespace(name="$run$", trained_length=8),
        settings=SimpleNamespace(targets=4, dtype="float32"),
        windows=3,
        unit=np.arange(3),
        layer_kinds=["full", "full"],
        edges=lambda length: bucket_edges(length, 8),
        seen={(method, length): seen(rng, length) for method in methods for length in lengths},
        pairs={
            ("yarn", 32): [SimpleNamespace(kind="full", wavelength=w) for w in (6.0, 60.0, None)]
        },
    )
    found.lengths_of = MethodType(AttentionResult.lengths_of, found)
    figure = attention_report.by_length(found, "trained", lengths)
    for axes, measure in zip(figure.axes, attention_report.DRAWN, strict=True):
        values = [found.seen["trained", n].values[measure].numpy() for n in lengths]
        expected = {f"layer {k + 1}": [v[:, k].mean() for v in values] for k in (0, 1)}
        expected["mean"] = [v.mean() for v in values]
        compare(axes, expected, lengths)
    found.overall = MethodType(AttentionResult.overall, found)
    figure = attention_report.by_method(found, methods)
    for axes, measure in zip(figure.axes, attention_report.DRAWN, strict=True):
        means = {
            method: [found.seen[method, n].values[measure].mean() for n in lengths]
            for method in methods
        }
        compare(axes, {"as trained": means["trained"], "yarn": means["yarn"]}, lengths)
    figure = attention_report.by_distance(found, "yarn", lengths)
    assert figure.axes[0].get_ylabel() and all(axes.get_xlabel() for axes in figure.axes)
    for layer, axes in enumerate(figure.axes):
        drawn_here = labelled(axes)
        for length in lengths:
            edges = bucket_edges(length, 8)
            x = [math.sqrt((low + 1) * high) for low, high in pairwise(edges)]
            mass = found.seen["yarn", length].by_distance[:, layer].numpy().mean((0, 1))
            close(drawn_here[f"{length} tokens"], x, mass)
        even = found.seen["yarn", 32].visible[layer].numpy()
        close(drawn_here["uniform at 32"], x, even)
    figure = attention_report.reach(found, "yarn", lengths)
    for layer, axes in enumerate(figure.axes):
        reaches = [
            found.seen["yarn", n].values["reach_90"][:, layer].numpy().mean(0) for n in lengths
        ]
        one = shown(axes, attention_report.COLOURS[0])
        for line, reach in zip(
            sorted([one.points, *one.thin]), sorted(np.array(reaches).T.tolist()), strict=True
        ):
            close(line, lengths, reach)
        close(labelled(axes)["uniform attention"], lengths, [0.9 * n for n in lengths])
        assert axes.get_ylabel() or layer
    axes = attention_report.wavelengths(found).axes[0]
    assert [points(line) for line in lines(axes)] == [[(0, 6.0)], [(1, 60.0)]] and levels(axes) == [
        8
    ]


def compare(axes, expected: dict[str, list], x: list) -> None:
    by_name = labelled(axes)
    assert set(by_name) == set(expected)
    for name, values in expected.items():
        close(by_name[name], x, values)


def test_generation_shows_means_over_prompts_by_bucket():
    rng = np.random.default_rng(1)
    edges = [8, 16, 24]
    sources = ["greedy", "temperature 1", REAL]
    found = SimpleNamespace(
        methods=[Method("trained", ())],
        sources=sources,
        edges=edges,
        unit=np.arange(6),
        subject=SimpleNamespace(name="run", trained_length=8),
        settings=SimpleNamespace(confidence=0.95, dtype="float32"),
        values={
            ("trained", source): {
                name: rng.uniform(size=(6, 2)) for name in generation_report.DRAWN
            }
            for source in sources
        },
    )
    buckets = {}
    for row in generation_report.measure_rows(found):
        curve = ("trained", row["source"], row["measure"])
        buckets.setdefault(curve, []).append((row["start"], row["stop"], row["value"]))
    figure = generation_report.by_position(found, buckets, "trained")
    for axes, measure in zip(figure.axes, generation_report.DRAWN, strict=True):
        means = {source: found.values["trained", source][measure].mean(0) for source in sources}
        compare(axes, means, [12, 20])
        assert to_hex(axes.lines[2].get_color()) == INK  # what people wrote
