"""Figures of a study show the numbers of its results file."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_hex

from evaluation.reports.charts import Curve, FigureText
from evaluation.reports.length_charts import ReferenceLines, length_chart
from scripts.plots import plot_sweep
from studies.report import figures as drawings
from studies.report.figures import FigureBuilder
from studies.report.plots import informative
from studies.report.report import section
from studies.report.training_figure import training_figure
from studies.results.compare import derive
from studies.results.losses import read_losses
from studies.results.others import read_other
from studies.results.stored import read_study
from studies.results.training_curves import read_curves
from tests.artists import close, ends, levels, lines, named, points, shown
from tests.studies.results.test_compare import GROUP, raw, two_way
from tests.studies.results.test_training_curves import make_run
from tests.studies.synthetic import L0, LENGTHS, results
from tests.studies.synthetic_others import CHANCE, add
from tests.studies.test_plot_sweep import BEST, VALUES, make_study

MINUS = str.maketrans("-", "−")


class Figures(dict):
    """A study's figures by name, and the captions beside them, drawn without being written."""

    def __init__(self, record: dict, monkeypatch, tmp_path: Path):
        super().__init__()

        def save(figure, folder, name):
            self[name] = figure
            (tmp_path / f"{name}.svg").write_text("<svg></svg>")
            return tmp_path / f"{name}.png"

        monkeypatch.setattr(drawings, "save", save)
        self.study = read_study(record)
        self.captions = {}
        draw = FigureBuilder(self.study, tmp_path)
        comparison = derive(self.study, read_losses(self.study, "long", GROUP))
        pictures = [draw.by_length, draw.gain, draw.differences, draw.learned]
        for picture in [*(one(comparison) for one in pictures), *draw.each_alone(comparison)]:
            self.captions[picture.name] = picture.caption
        self.comparison = comparison
        self.draw = draw


@pytest.fixture(scope="module")
def record():
    return results()


@pytest.fixture(scope="module")
def figures(record, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Figures(record, monkeypatch, tmp_path_factory.mktemp("figures"))


def of(record, name):
    """(lengths, (lengths, S, D) of a variant's NLL, (S, D) as trained at L0)."""
    scheme, method = ("rope", "yarn") if name == "rope + yarn" else (name, "trained")
    found = {n: raw(record, scheme, method, n) for n in LENGTHS}
    found = {n: nll for n, nll in found.items() if not np.isnan(nll).any()}
    return list(found), np.array(list(found.values())), raw(record, scheme, "trained", L0)


NAMES = ("rope", "rope + yarn", "none", "alibi", "window", "learned", "sinusoidal", "fox")


def test_nll_by_length_shows_means_seeds_and_the_bars_of_the_change(record, figures):
    (axes,) = figures["nll_by_length"].axes
    found = named(axes)
    assert set(found) >= set(NAMES)
    for name in NAMES:
        lengths, nll, base = of(record, name)
        close(found[name].points, lengths, nll.mean((1, 2)))
        seeds = nll.shape[1]
        assert len(found[name].thin) == (seeds if seeds > 1 else 0)
        for line, one in zip(found[name].thin, nll.mean(2).T, strict=True) if seeds > 1 else ():
            close(line, lengths, one)
        if seeds > 1 and len(lengths) > 1:
            for length, level in zip(lengths[1:], nll[1:], strict=True):
                half = two_way(level - base, figures.comparison.family)[1]
                if half > 1e-9:
                    mean = level.mean()
                    assert found[name].bars[length] == pytest.approx((mean - half, mean + half))
        else:
            assert not found[name].bars
        end = next(end for end in ends(axes) if end.name == name)
        assert end.value.startswith(f"{nll[-1].mean():.2f}")
        assert end.value.endswith("at 256") == (name == "learned")
    assert levels(axes) == [
        pytest.approx(of(record, "rope")[2].mean()),
        pytest.approx(record_unigram(record)),
    ]


def record_unigram(record) -> float:
    return float(np.mean(record["cells"][0]["evaluations"]["long"]["unigram_unit_nll"]))


def test_one_panel_per_variant_shows_the_others_the_baseline_and_the_exposure(record, figures):
    axes = [one for one in figures["nll_by_length_each"].axes if one.get_title(loc="left")]
    assert [one.get_title(loc="left") for one in axes] == figures.comparison.names
    for one in axes:
        name = one.get_title(loc="left")
        lengths, nll, base = of(record, name)
        close(shown(one, figures.draw.styles[name][0]).points, lengths, nll.mean((1, 2)))
        assert levels(one) == [pytest.approx(base.mean())]
        grey = shown(one, "#C9C9C9")
        others = [of(record, other)[1].mean((1, 2)).tolist() for other in NAMES if other != name]
        assert sorted(y for line in [grey.points, *grey.thin] for _, y in line) == pytest.approx(
            sorted(y for other in others for y in other)
        )
    strips = [one for one in figures["nll_by_length_each"].axes if not one.get_title(loc="left")]
    for title, strip in zip(axes, strips, strict=True):
        last = 64 if title.get_title(loc="left") == "window" else L0
        spans = [part.get_extents() for bars in strip.collections for part in bars.get_paths()]
        rows = [
            max((box.x1 for box in spans if row < box.y0 < row + 1), default=0) for row in (0, 1)
        ]
        low = strip.get_xlim()[0]
        # distances, positions
        assert rows == [pytest.approx(last) if last > low else 0, pytest.approx(L0)]


def test_net_gain_begins_at_the_training_length(record, figures):
    (axes,) = figures["net_gain"].axes
    found = named(axes)
    for name in set(NAMES) - {"learned"}:
        lengths, nll, base = of(record, name)
        close(found[name].points, lengths, [(base - level).mean() for level in nll])
        assert found[name].points[0][0] == L0
        for length, level in zip(lengths, nll, strict=True):
            half = two_way(base - level)[1] if len(base) > 1 and (level != base).any() else 0.0
            if half > 1e-9:
                mean = (base - level).mean()
                assert found[name].bars[length] == pytest.approx((mean - half, mean + half))
            else:
                assert length not in found[name].bars
    assert levels(axes) == [0.0]
    labels = {end.name: end.value for end in ends(axes)}
    assert labels["alibi"] == f"{(base_gain(record, 'alibi')):+.3f}".translate(MINUS)
    order = sorted(set(NAMES) - {"learned"}, key=lambda name: -base_gain(record, name))
    assert [end.name for end in ends(axes) if end.name in order] == order


def base_gain(record, name) -> float:
    _, nll, base = of(record, name)
    return float((base - nll[-1]).mean())


@pytest.mark.parametrize("span", [(-0.06, 0.015), (-0.015, 0.06), (-3.0, 0.0), (0.0, 0.3)])
def test_symlog_ticks_cover_the_data_without_crowding(span):
    """At least three ticks lie where the lines are, none crowded by another."""
    low, high = span
    line = Curve("a", [256.0, 512.0, 1024.0], [0.0, low, high])
    (axes,) = length_chart([line], ReferenceLines(256, band=0.02), FigureText("t", "s"), "y").axes
    inside = [
        tick for tick in axes.get_yticks() if min(low, 0) - 0.02 <= tick <= max(high, 0) + 0.02
    ]
    assert len(inside) >= 3 and 0 in inside
    at = sorted(axes.transData.transform([(256, tick) for tick in axes.get_yticks()])[:, 1])
    assert min(np.diff(at)) >= 0.07 * axes.bbox.height


def test_differences_are_sorted_dots_with_intervals(record, figures):
    found = {(row.variant, row.length): row for row in figures.comparison.select("difference")}
    for axes, length in zip(figures["difference"].axes, (256, 4096), strict=True):
        names = [text.get_text() for text in axes.get_yticklabels()]
        own = {name: value for (name, at), value in found.items() if at == length}
        assert names == sorted(own, key=lambda name: own[name].value)
        base = of(record, "rope")[1][LENGTHS.index(length)].mean()
        for row, name in enumerate(names):
            lengths, nll, _ = of(record, name)
            value = nll[lengths.index(length)].mean() - base
            here = [points(line) for line in lines(axes) if points(line)[0][1] == row]
            assert [pytest.approx((value, row))] in here
            labels = [text.get_text() for text in axes.texts if text.xy == (1, row)]
            assert labels == [
                f"{round(value, 3) + 0.0:+.3f}".translate(MINUS).replace("+0.000", "0.000")
            ]
            bars = [line for line in here if len(line) == 2]
            if math.isnan(own[name].low):
                assert bars == []
            else:
                assert [(x, y) for x, y in bars[0]] == [(own[name].low, row), (own[name].high, row)]
                assert (own[name].low + own[name].high) / 2 == pytest.approx(value)


def test_nll_at_the_training_length_is_shown_by_seed(record, figures):
    (axes,) = figures["learned"].axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    base = {name: of(record, name)[2] for name in NAMES if name != "rope + yarn"}
    assert names == sorted(base, key=lambda name: base[name].mean())
    for row, name in enumerate(names):
        here = [points(line) for line in lines(axes) if points(line)[0][1] == row]
        assert sorted(x for line in here for x, _ in line) == pytest.approx(
            sorted([base[name].mean(), *base[name].mean(1)])
        )


def test_intervals_wider_than_the_range_of_points_are_omitted_and_counted(monkeypatch, tmp_path):
    """One seed of rope leaves the others at 512 tokens: its interval would press all lines flat."""
    record = results(schemes=("rope", "none", "alibi"))
    (cell,) = [c for c in record["cells"] if c["id"] == "scheme=rope,seed=1"]
    (row,) = [
        r
        for r in cell["evaluations"]["long"]["cells"]
        if (r["method"], r["length"]) == ("trained", 512)
    ]
    row["unit_nll"] = [value + 1.5 for value in row["unit_nll"]]
    figures = Figures(record, monkeypatch, tmp_path)
    rope = named(figures["nll_by_length"].axes[0])["rope"]
    _, nll, base = of(record, "rope")
    half = two_way(nll[1] - base, figures.comparison.family)[1]
    low, high = figures["nll_by_length"].axes[0].get_ylim()
    assert 2 * half > high - low and 512 not in rope.bars and 2048 in rope.bars
    close(rope.points, LENGTHS, nll.mean((1, 2)))
    assert dict(rope.thin[1])[512] == pytest.approx(nll[1, 1].mean())
    note = figures["nll_by_length"].texts[-1].get_text()
    for labels in (note, figures.captions["nll_by_length"], figures.captions["nll_by_length_each"]):
        assert "1 of 16 bars" in labels


def test_informative_keeps_intervals_within_the_range_of_points():
    series = [
        Curve("a", [1, 2], [1.0, 2.0], low=[0.9, 0.4], high=[1.1, 3.6]),
        Curve("b", [1], [9.0], low=[math.nan], high=[math.nan]),
    ]
    assert [one.low[1] for one in informative(series)[:1]] == [0.4]  # 3.2 of 8
    capped = informative(series, top=3.0)  # 3.2 of 2
    assert math.isnan(capped[0].low[1]) and capped[0].high[0] == 1.1 and capped[0].y == [1.0, 2.0]


@pytest.mark.parametrize("how", [{"seeds": 1}, {"seeds": 2}, {"units": 5}])
def test_captions_and_notes_mention_only_intervals_that_are_drawn(how, monkeypatch, tmp_path):
    figures = Figures(results(**how, schemes=("rope", "alibi", "fox")), monkeypatch, tmp_path)
    for name in ("nll_by_length", "nll_by_length_each", "net_gain", "difference"):
        labels = figures.captions[name] + " ".join(text.get_text() for text in figures[name].texts)
        assert "Bars" not in labels and "interval" not in labels.replace("without intervals", ""), (
            name
        )
    assert not any(one.bars for one in named(figures["nll_by_length"].axes[0]).values())


def test_figures_of_tasks_attention_and_positions_show_the_measured_numbers(monkeypatch, tmp_path):
    record = add(results(schemes=("rope", "window", "alibi")))
    figures = Figures(record, monkeypatch, tmp_path)
    for name in ("passkey", "attention", "position"):
        section(read_other(figures.study, name, GROUP), figures.draw)

    def cells(scheme, evaluation):
        found = [
            c for c in record["cells"] if c["axes"]["scheme"] == scheme and c["status"] == "done"
        ]
        return [c["evaluations"][evaluation] for c in found]

    (axes,) = figures["passkey_accuracy"].axes
    for scheme in ("rope", "window", "alibi"):
        shares = {n: [] for n in (128, 256, 512, 1024)}
        depths = {}
        for one in cells(scheme, "passkey"):
            for cell in one["cells"]:
                shares[cell["length"]] += (
                    [100 * cell["accuracy"]] if cell["method"] == "trained" else []
                )
            for spot in one["by_depth"]:
                if spot["method"] == "trained":
                    depths.setdefault((spot["length"], spot["where"]), []).append(
                        spot["share"]["share"]
                    )
        means = [np.mean(values) for values in shares.values()]
        found = named(axes)[scheme]
        close(found.points, list(shares), means)
        accuracy = read_other(figures.study, "passkey", GROUP)
        for length in shares:
            share = accuracy.get(scheme, "accuracy", length)
            ends_there = 100 * max(share.low, 0.0), 100 * min(share.high, 1.0)
            assert found.bars[length] == pytest.approx(ends_there)
        (heat,) = [a for a in figures["passkey_depth"].axes if a.get_title(loc="left") == scheme]
        assert 0 <= heat.get_position().x0 < heat.get_position().x1 <= 1
        at = sorted({depth for _, depth in depths})
        for (length, depth), values in depths.items():
            x = list(shares).index(length)
            y = at.index(depth)
            (square,) = [p for p in heat.patches if p.get_xy() == (x - 0.5, y - 0.5)]
            (text,) = [t.get_text() for t in heat.texts if t.get_position() == (x, y)]
            assert to_hex(square.get_facecolor()) == to_hex(colormaps["cividis"](np.mean(values)))
            assert text == f"{100 * np.mean(values):.0f}"
        assert [t.get_text() for t in heat.get_xticklabels()] == ["128", "256", "512", "1,024"]
        headings = {"first_token": "mass on the first token", "logit_max": "largest logit"}
        for measure, heading in headings.items():
            (panel,) = [
                a for a in figures["attention_attention"].axes if a.get_title(loc="left") == heading
            ]
            rows = [
                [
                    c["value"]
                    for c in one["cells"]
                    if (c["method"], c["measure"], c["layer"]) == ("trained", measure, None)
                ]
                for one in cells(scheme, "attention")
            ]
            color = figures.draw.styles[scheme][0]
            close(shown(panel, color).points, (256, 512, 1024), np.mean(rows, axis=0))
        (by_position,) = figures["position_by_position"].axes
        buckets = [one["by_position"]["trained"] for one in cells(scheme, "position")]
        x = [math.sqrt((b["low"] + 1) * b["high"]) for b in buckets[0]]
        y = np.mean([[b["nll"] for b in one] for one in buckets], axis=0)
        close(named(by_position)[scheme].points, x, y)
    assert levels(axes) == [pytest.approx(100 * CHANCE)]


def test_a_sweep_shows_means_and_seeds_and_rings_the_best(tmp_path):
    study = read_study(plot_sweep.read_results(make_study(tmp_path)))
    figure = plot_sweep.draw(
        plot_sweep.read_sweeps(study, "held-out", "rate", "width"), "rate", "width"
    )
    rates = sorted(map(float, VALUES))
    for axes, scheme in zip(figure.axes, ("a", "b"), strict=True):
        assert axes.get_title(loc="left") == scheme and axes.get_xlabel() == "rate"
        for color, width in zip(plot_sweep.COLOURS, ("32", "64"), strict=False):
            best = BEST[scheme, width]
            nll = [2 + 0.1 * math.log2(rate / best) ** 2 for rate in rates]
            one = shown(axes, color)
            close(one.points, rates, [value + 0.002 for value in nll])
            assert len(one.marks) == 4
            for seeds, rate, value in zip(one.marks, rates, nll, strict=True):
                close(seeds, [rate] * 2, [value, value + 0.004])
        ringed = [points(line)[0] for line in lines(axes) if line.get_markersize() == 10]
        assert ringed == [pytest.approx((BEST[scheme, width], 2.002)) for width in ("32", "64")]
    assert figure.axes[0].get_ylabel()


def test_training_curves_show_the_logged_metrics(tmp_path):
    one = read_curves(make_run(tmp_path / "one"), "one")
    other = read_curves(make_run(tmp_path / "other", loss=lambda step: 4.0 + step % 2), "$other$")
    figure = training_figure([one, other], 0.1)
    loss, *panels, rate = figure.axes
    steps = np.arange(1, 41)
    tokens = 100.0 * np.arange(1, 41)
    assert [end.name for end in ends(loss)] == ["$other$", "one"]
    for name, values in (("one", 8 / steps), ("$other$", 4.0 + steps % 2)):
        found = named(loss)[name]
        smooth = []
        for at in range(40):  # four steps around each, none across a change after step 26 or 30
            low, high = next((a, b) for a, b in ((0, 26), (26, 30), (30, 40)) if a <= at < b)
            smooth.append(np.mean(values[max(low, at - 1) : min(high, at + 3)]))
        close(found.points, tokens, smooth)
        close(found.thin[0], tokens, values)
        (end,) = [end for end in ends(loss) if end.name == name]
        assert end.value == f"{smooth[-1]:.3f}"
        close(shown(rate, end.color).points, tokens, 1e-3 * steps)
        for panel, nll in zip(panels, ((2.0, 2.0), (3.3, 3.4)), strict=True):
            close(shown(panel, end.color).points, (3000, 4000), nll)
    assert [panel.get_title(loc="left")[:15] for panel in panels] == [
        "held out, 1 × L",
        "held out, 2 × L",
    ]
    assert all(axes.get_ylabel() for axes in (loss, panels[0], rate)) and rate.get_xlabel()
