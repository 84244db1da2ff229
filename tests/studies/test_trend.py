"""The trend of an effect with size, against least squares, statsmodels and a simulation."""

import numpy as np
import pandas as pd
import pytest

from errors import StudyError
from evaluation.reports.document import markdown_table
from studies.study_settings import PredictedRung, TrendSettings
from studies.trend import (
    COLUMNS,
    RungEffect,
    Trend,
    effect_rows,
    rows_of_study,
    trend_figure,
    trend_table,
    trends_of,
    with_stored_rows,
)

SIZES = [200_000, 800_000, 800_000, 3_000_000, 12_000_000]
LENGTHS = [128, 128, 256, 256, 512]
SEEDS = [4, 4, 4, 3, 2]


UNITS = list("abcdefghi")


def ladder(effects, noise=0.0, spread=1e-9, generator=None, seeds=SEEDS):
    """Rungs whose seeds have SD `noise`, and whose means have a standard error `spread` from nine
    units, the same on all rungs: the shift of all means and its estimate are drawn."""
    generator = generator or np.random.default_rng(0)
    of_units = generator.normal(0, spread * 3, len(UNITS))
    rungs = []
    for i, (effect, count) in enumerate(zip(effects, seeds, strict=True)):
        values = effect + generator.normal(0, noise, count) + of_units.mean()
        residuals = pd.Series((of_units - of_units.mean()) / len(UNITS), index=UNITS)
        rungs.append(
            RungEffect(str(i), SIZES[i], LENGTHS[i], values, float(values.mean()), residuals)
        )
    return rungs


def test_the_line_is_that_of_least_squares_in_size_and_length():
    effects = np.array([0.3, -0.1, 0.4, 0.05, 0.9])
    trend = Trend(ladder(effects), delta=0.1)
    x = np.log10(SIZES)
    design = np.column_stack([np.ones(5), x, np.log2(LENGTHS)])
    fit = np.linalg.lstsq(design, effects, rcond=None)[0]
    assert trend.change.value == pytest.approx(fit[1] * (x[-1] - x[0]))
    mean = [1, 7.1, np.mean(np.log2(LENGTHS))]
    assert trend.at(7.1).value == pytest.approx(fit @ mean)
    rung = PredictedRung(label="31M", parameters=31_000_000, length=512, seeds=2)
    assert trend.predict(rung).value == pytest.approx(fit @ [1, np.log10(31e6), 9])
    assert Trend(ladder(effects)[:3], 0.1).change.value == pytest.approx(
        np.polyfit(x[:3], effects[:3], 1)[0] * (x[2] - x[0])
    )  # too few rungs to tell the length from the size


@pytest.mark.parametrize(
    ("effects", "word"),
    [
        ([0.2, 0.5, 0.5, 0.8, 1.1], "grows"),
        ([-0.2, -0.5, -0.5, -0.8, -1.1], "grows"),
        ([1.1, 0.8, 0.8, 0.5, 0.2], "shrinks"),
        ([0.6, 0.3, 0.3, -0.3, -0.6], "turns"),
        ([0.52, 0.51, 0.5, 0.5, 0.49], "steady"),
    ],
)
def test_words(effects, word):
    trend = Trend(ladder(effects, 0.002, 0.002, np.random.default_rng(0)), delta=0.1)
    assert trend.word == word
    wide = Trend(ladder(effects, 3.0, 0.002, np.random.default_rng(0)), delta=0.1)
    assert wide.word == "not resolved"


@pytest.mark.parametrize("seeds", [SEEDS, [2, 2, 2, 2, 2]])
def test_intervals_cover(seeds):
    """Of the change, the line, a rung with two seeds, and the prediction of a rung that is measured
    later."""
    generator = np.random.default_rng(1)
    slope = 0.3
    effects = 0.1 + slope * np.log10(SIZES)
    change = slope * np.ptp(np.log10(SIZES))
    middle = float(np.log10(SIZES).mean())
    hits = np.zeros(4)
    last = PredictedRung(label="12M", parameters=SIZES[-1], length=LENGTHS[-1], seeds=2)
    rounds = 200
    for _ in range(rounds):
        rungs = ladder(effects, 0.05, 0.03, generator, seeds)
        trend = Trend(rungs, delta=0.1)
        truths = [
            (trend.change, change),
            (trend.at(middle), effects.mean()),
            (trend.interval_of(rungs[-1]), effects[-1]),
            (Trend(rungs[:-1], delta=0.1).predict(last), rungs[-1].mean),
        ]
        hits += [each.low <= truth <= each.high for each, truth in truths]
    assert np.all(hits / rounds > 0.9), hits / rounds  # 95% less three standard errors


def test_too_few_seeds_or_units_give_points():
    trend = Trend(ladder([0.2, 0.5, 0.5, 0.8, 1.1], seeds=[1] * 5), delta=0.1)
    assert np.isnan(trend.change.low)
    assert trend.word == "not resolved"


def cell(rung, scheme, seed, nll, gain=0.0):
    """A cell with units b, a of 3 and 1 targets, whose NLL at 1 and 4 times is given."""
    length, parameters = {"small": (16, 1000), "large": (32, 9000)}[rung]
    rows = [
        {"method": "trained", "length": length * times, "unit_nll": [value, value + 0.4]}
        for times, value in zip((1, 4), nll, strict=True)
    ]
    repeated = [
        {
            "method": "trained",
            "length": 4 * length,
            "distance_low": low,
            "units": ["a", "b"],
            "unit_targets": [1, weight],
            "unit_nll": [1.0, 1.0],
            "unit_control_nll": [1.0 + gain, 1.0 + 2 * gain],
        }
        for low, weight in ((length // 2, 7), (length, 1), (2 * length, 3))
    ]
    evaluations = {
        "loss": {"units": {"names": ["b", "a"], "targets": [3, 1]}, "cells": rows},
        "reading": {"repeated": {"cells": repeated}},
    }
    return {
        "id": f"{rung}-{scheme}-{seed}",
        "axes": {"rung": rung, "seed": seed, "scheme": scheme},
        "status": "done",
        "training": {"train_length": length, "layer_parameters": parameters},
        "evaluations": evaluations,
    }


TREND = TrendSettings.model_validate({
    "effects": {
        "rise": {
            "statement": "rope rises",
            "value": {"scheme": "rope", "length": "4x", "from": "1x"},
            "delta": 0.1,
            "expect": "grows",
        },
        "reads": {
            "statement": "rope reads",
            "value": {
                "scheme": "rope",
                "evaluation": "reading",
                "metric": "read_gain",
                "length": "4x",
                "distance": "1x",
            },
            "delta": 0.1,
            "expect": "steady",
        },
    }
})  # fmt: skip


@pytest.fixture
def cells():
    return [
        cell(rung, scheme, str(seed), (2.0, 3.0 + size + 0.01 * seed + other), gain=0.5)
        for rung, size in (("small", 0.0), ("large", 2.0))
        for scheme, other in (("rope", 0.0), ("none", 7.0))
        for seed in range(3)
    ]


def test_values_are_read_in_multiples_of_the_trained_length(cells):
    rows = effect_rows(TREND, cells)
    assert list(rows["rung"].unique()) == ["small", "large"]
    rise = rows.loc[(rows.effect == "rise") & (rows.rung == "large") & (rows.seed == "2")]
    assert rise.set_index("unit")["value"].to_dict() == pytest.approx({"a": 3.02, "b": 3.02})
    assert rise.set_index("unit")["targets"].to_dict() == {"a": 1, "b": 3}
    assert set(rise["parameters"]) == {9000}
    reads = rows.loc[(rows.effect == "reads") & (rows.rung == "small") & (rows.seed == "0")]
    # two octaves from the trained length on
    assert reads.set_index("unit")["targets"].to_dict() == {"a": 2, "b": 4}
    assert reads.set_index("unit")["value"].to_dict() == pytest.approx({"a": 0.5, "b": 1.0})


def test_unmeasured_cells_are_left_out_and_stored_rows_kept(cells, tmp_path):
    every = effect_rows(TREND, cells)
    every.to_csv(tmp_path / "effects.csv", index=False)
    for each in cells:
        if each["axes"]["rung"] == "small" or each["axes"]["seed"] == "1":
            each["status"] = "pending"
    rows = effect_rows(TREND, cells)
    assert set(zip(rows["rung"], rows["seed"], strict=True)) == {("large", "0"), ("large", "2")}
    rows["value"] += 1
    merged = with_stored_rows(rows, tmp_path / "effects.csv")
    assert len(merged) == len(every)
    order = ["effect", "rung", "seed", "unit"]
    changes = merged.set_index(order)["value"] - every.set_index(order)["value"]
    new = [rung == "large" and seed != "1" for _, rung, seed, _ in changes.index]
    assert np.allclose(changes, np.array(new, dtype=float))
    pd.testing.assert_frame_equal(with_stored_rows(rows, tmp_path / "absent.csv"), rows)


def test_rows_of_renamed_labels_are_not_used(cells, tmp_path):
    file = tmp_path / "effects.csv"
    every = effect_rows(TREND, cells)
    for column, label, old in (("effect", "rise", "rises"), ("rung", "large", "NA")):
        renamed = every.replace({column: {label: old}})
        pd.concat([every, renamed.loc[renamed[column] == old]]).to_csv(file, index=False)
        stored = with_stored_rows(every, file)
        assert set(stored[column]) == {*every[column], old}
        own = rows_of_study(TREND, cells, stored)
        assert own.sort_values(COLUMNS).to_dict("list") == every.sort_values(COLUMNS).to_dict(
            "list"
        )


@pytest.mark.parametrize("damage", ["cut", "no header", "twice", "empty"])
def test_a_damaged_file_of_effects_is_refused(cells, tmp_path, damage):
    file = tmp_path / "effects.csv"
    every = effect_rows(TREND, cells)
    text = every.to_csv(index=False)
    rest = text.split("\n", 1)[1]
    damaged = {"cut": text[:-20], "no header": rest, "twice": text + rest, "empty": ""}
    file.write_text(damaged[damage])
    with pytest.raises(StudyError, match="is damaged"):
        with_stored_rows(every, file)


def test_seeds_with_different_targets_are_refused(cells):
    rows = effect_rows(TREND, cells)
    with pytest.raises(StudyError, match="rise on rung small"):
        trend_table(TREND, rows.iloc[1:])
    rows.loc[0, "targets"] += 1
    with pytest.raises(StudyError, match="rise on rung small"):
        trend_table(TREND, rows)


def test_labels_of_effects_may_be_numbers(cells):
    values = [{"scheme": 8, "length": "4x"}, {"scheme": 8, "length": "1x"}]
    effect = TREND.effects["rise"].model_copy(update={"value": {"minus": values}})
    trend = TREND.model_copy(update={"effects": {"rise": effect}})
    for each in cells:
        if each["axes"]["scheme"] == "rope":
            each["axes"]["scheme"] = "8"
    assert set(effect_rows(trend, cells)["rung"]) == {"small", "large"}


def test_table_and_figure(cells):
    rows = effect_rows(TREND, cells)
    table = trend_table(TREND, rows)
    assert [row[0] for row in table.rows] == ["rope rises", "rope reads"]
    assert [row[-3] for row in table.rows] == ["not resolved", "not resolved"]  # two units
    assert "small" in markdown_table(table.columns, table.rows)
    figure = trend_figure(TREND, rows)
    assert len(figure.axes) == 2
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_title(loc="left")) == ("log", "rope rises\nnot resolved")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["large", "small"]


def test_two_lengths_of_one_size_have_no_trend(cells):
    rows = effect_rows(TREND, cells)
    small = rows.loc[rows["rung"] == "small"]
    assert len(trends_of(TREND, rows)) == 2
    longer = small.assign(rung="small at 32", length=32)
    assert trends_of(TREND, pd.concat([small, longer])) == {}


def test_a_rung_is_predicted_from_the_others(cells):
    rung = {"label": "huge", "parameters": 81_000, "length": 32, "seeds": 3}
    trend = TREND.model_copy(update={"predicted": PredictedRung.model_validate(rung)})
    for each in cells:
        each["evaluations"]["loss"]["units"] = {"names": list("abcdefgh"), "targets": [3] * 8}
        for row in each["evaluations"]["loss"]["cells"]:
            row["unit_nll"] = row["unit_nll"][:1] * 8
    rows = effect_rows(trend, cells)
    table = trend_table(trend, rows)
    assert table.columns[1:4] == ["small", "large", "huge, predicted"]
    assert table.rows[0][3].startswith("+5.010 [")  # 1.01 and 3.01 at 1,000 and 9,000 parameters
    huge = rows.loc[rows["rung"] == "large"].assign(rung="huge", parameters=81_000, value=9.0)
    measured = trend_table(trend, pd.concat([rows, huge]))
    assert measured.rows[0][3].startswith("+9.000 [")
    assert measured.rows[0][4] == table.rows[0][3]
    for shown in (rows, pd.concat([rows, huge]), pd.concat([rows, huge.assign(parameters=85_000)])):
        axes = trend_figure(trend, shown).axes[0]
        assert "predicted" in axes.get_legend_handles_labels()[1]
        ticks = {tick.get_text() for tick in axes.get_xticklabels()}
        assert ticks == {"small", "large", "huge"} and len(axes.get_xticks()) == 3


def test_other_targets_and_missing_lengths_are_refused(cells):
    def rise(value):
        effect = TREND.effects["rise"].model_copy(update={"value": value})
        return TREND.model_copy(update={"effects": {"rise": effect}})

    both = rise({"minus": [{"scheme": name, "length": "1x"} for name in ("rope", "none")]})
    assert np.allclose(effect_rows(both, cells)["value"], 0)
    cells[3]["evaluations"]["loss"]["units"]["targets"] = [2, 2]
    with pytest.raises(StudyError, match="targets"):
        effect_rows(both, cells)
    with pytest.raises(StudyError, match="2x"):
        effect_rows(rise({"scheme": "rope", "length": "2x"}), cells)
