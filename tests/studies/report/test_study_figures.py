"""Figures of a study show the numbers of its results table."""

import math

import numpy as np
import pytest

from evaluation.reports.charts import Curve, FigureText
from evaluation.reports.length_charts import ReferenceLines, length_chart
from studies.report.report import other_section
from studies.report.study_figures import ATTENTION_MEASURES, StudyFigures
from studies.results.other_evaluations import read_other
from studies.results.stored import read_study
from tests.artists import close, ends, levels, lines, named, points, shown
from tests.studies.results.test_loss_comparison import derived
from tests.studies.synthetic import L0, results, with_others

RECORD = with_others(results())


@pytest.fixture
def draw(figures, tmp_path):
    return StudyFigures(read_study(RECORD), tmp_path)


@pytest.fixture(scope="module")
def table():
    return derived(RECORD)


def test_nll_by_length_shows_means_and_seeds(draw, figures, table):
    draw.by_length(table)
    (axes,) = figures["nll_by_length"].axes
    drawn = named(axes)
    for name in table.names:
        rows = table.measured(name)
        close(drawn[name].points, [row.length for row in rows], [row.value for row in rows])
        seeds = table.seed_count(name)
        assert len(drawn[name].thin) == (seeds if seeds > 1 else 0) and not drawn[name].bars
        for seed, line in enumerate(drawn[name].thin):
            own = list(table.select("nll", name, seed=str(seed)))
            close(line, [row.length for row in own], [row.value for row in own])
    texts = {end.name: end.value for end in ends(axes)}
    assert texts["learned"].endswith("at 256") and "↑" in texts["sinusoidal"]
    truncated = table.value("rope", "nll_as_trained", L0)
    assert levels(axes) == pytest.approx([truncated, table.losses.unigram])


def test_net_gain_begins_at_the_trained_length(draw, figures, table):
    draw.gain(table)
    (axes,) = figures["net_gain"].axes
    drawn = named(axes)
    for name in set(table.names) - {"learned"}:
        rows = [row for row in table.select("gain", name) if row.length >= L0]
        close(drawn[name].points, [row.length for row in rows], [row.value for row in rows])
        bars = {row.length: (row.low, row.high) for row in rows if row.high > row.low}
        assert drawn[name].bars.keys() == bars.keys()
        for length, bar in bars.items():
            assert drawn[name].bars[length] == pytest.approx(bar)
    assert levels(axes) == [0.0] and "learned" not in drawn


def test_differences_are_sorted_dots_with_intervals(draw, figures, table):
    draw.differences(table)
    for axes, length in zip(figures["difference"].axes, (256, 4096), strict=True):
        rows = [row for row in table.select("difference") if row.length == length]
        rows.sort(key=lambda row: row.value)
        assert [text.get_text() for text in axes.get_yticklabels()] == [r.variant for r in rows]
        for at, row in enumerate(rows):
            here = [points(line) for line in lines(axes) if points(line)[0][1] == at]
            assert [pytest.approx((row.value, at))] in here
            bars = [line for line in here if len(line) == 2]
            expected = [] if math.isnan(row.low) else [[(row.low, at), (row.high, at)]]
            assert bars == expected


@pytest.mark.parametrize("size", [{"seeds": 1}, {"seeds": 2}, {"units": 5}])
def test_captions_mention_only_intervals_that_are_drawn(draw, size):
    table = derived(results(**size, schemes=("rope", "alibi", "fox")))
    for figure in (draw.by_length(table), draw.gain(table), draw.differences(table)):
        assert "Bars" not in figure.caption and "Intervals" not in figure.caption


@pytest.mark.parametrize("span", [(-0.06, 0.015), (-0.015, 0.06), (-3.0, 0.0), (0.0, 0.3)])
def test_symlog_ticks_cover_the_data_without_crowding(span):
    """At least three ticks lie where the lines are, none crowded by another."""
    low, high = span
    line = Curve("a", [256.0, 512.0, 1024.0], [0.0, low, high])
    (axes,) = length_chart([line], ReferenceLines(256, band=0.02), FigureText("t", "s"), "y").axes
    ticks = axes.get_yticks()
    inside = [tick for tick in ticks if min(low, 0) - 0.02 <= tick <= max(high, 0) + 0.02]
    assert len(inside) >= 3 and 0 in inside
    heights = sorted(axes.transData.transform([(256, tick) for tick in ticks])[:, 1])
    assert min(np.diff(heights)) >= 0.07 * axes.bbox.height


def test_tasks_attention_and_positions_show_the_measured_numbers(draw, figures, table):
    draw.by_length(table)
    study = read_study(RECORD)
    others = {name: read_other(study, name, ()) for name in ("passkey", "attention", "position")}
    for other in others.values():
        assert other_section(other, draw).blocks
    drawn = named(figures["passkey_accuracy"].axes[0])
    for row in others["passkey"].select("accuracy"):
        assert (row.length, pytest.approx(100 * row.value)) in drawn[row.variant].points
        bar = (100 * max(row.low, 0.0), 100 * min(row.high, 1.0))
        assert drawn[row.variant].bars[row.length] == pytest.approx(bar)
    panels = {a.get_title(loc="left"): a for a in figures["attention_attention"].axes}
    for row in others["attention"].select("logit_max"):
        line = shown(panels[ATTENTION_MEASURES["logit_max"]], draw.styles[row.variant][0]).points
        assert (row.length, pytest.approx(row.value)) in line
    drawn = named(figures["position_by_position"].axes[0])
    for row in others["position"].select("nll_at_positions", where=None):
        seen = math.sqrt((row.where[0] + 1) * row.where[1])
        assert (pytest.approx(seen), pytest.approx(row.value)) in drawn[row.variant].points
