"""Every derived column of a study's rows and tables, against hand-computed values."""

import csv
import io
import math

import numpy as np
import pytest

from studies.report import tables
from studies.results.stored import read_study
from studies.results.table import csv_text
from tests.studies.results.test_compare import GROUP, derived, raw, two_way
from tests.studies.synthetic import L0, LENGTHS, results


def test_every_derived_column_of_the_rows_by_hand():
    record = results(seen=2)
    comparison = derived(record)
    family = 9 * 4 - 4
    found = wide(read_study(record), comparison)
    unigram = np.mean(record["cells"][0]["evaluations"]["long"]["unigram_unit_nll"])
    weights = [64 * (6 + j % 3) for j in range(9)]
    for name, method in (("rope", "trained"), ("rope + yarn", "yarn"), ("window", "trained")):
        scheme = "window" if name == "window" else "rope"
        base = raw(record, scheme, "trained", L0)
        words = {}
        uppers = {n: upper_of(raw(record, scheme, method, n) - base) for n in LENGTHS}
        for length in LENGTHS:
            row = found[name, length]
            nll = raw(record, scheme, method, length)
            pooled = np.average(nll, axis=1, weights=weights).mean()
            expected = {
                "nll_pooled": pooled,
                "perplexity": math.exp(pooled),
                "bits_per_byte": pooled / 2.3,
            }
            expected |= {"nll": nll.mean(), "nll_as_trained": base.mean(), "unigram_nll": unigram}
            ends_of(expected, "nll", *two_way(nll))
            expected["delta"], expected["gain"] = (nll - base).mean(), (base - nll).mean()
            if (nll != base).any():
                ends_of(expected, "delta", *two_way(nll - base, family))
                ends_of(expected, "gain", *two_way(base - nll))
                expected["delta_upper"] = uppers[length]
            if length > L0:
                held = all(upper < 0.02 for n, upper in uppers.items() if n <= length)
                word = (
                    "broken" if expected["delta_low"] > 0.02 else "held" if held else "inconclusive"
                )
                assert row["verdict"] == word
                words[length] = word
            if length in (256, 4096) and name != "rope":
                other = raw(record, "rope", "trained", length)
                expected["difference"] = (nll - other).mean()
                if scheme == "rope" and (nll != other).any():
                    ends_of(expected, "difference", *two_way(nll - other, 16))
            for key, value in expected.items():
                assert float(row[key]) == pytest.approx(value, rel=1e-6, abs=1e-9), (
                    name,
                    length,
                    key,
                )
        held, broken = (
            [n for n, word in words.items() if word == one] for one in ("held", "broken")
        )
        assert comparison.value(name, "held_to") == max(held, default=None)
        assert comparison.value(name, "break_point") == min(broken, default=None)
        assert bool(comparison.select("difference", name)) == (name != "rope")


def wide(study, comparison) -> dict[tuple[str, int], dict]:
    """results.csv with one dict of metrics per variant and length; rows without a length count for all."""
    rows = list(csv.DictReader(io.StringIO(csv_text(study, [comparison]))))
    found: dict[tuple[str, int], dict] = {}
    for row in rows:
        if row["seed"] or row["where"]:
            continue
        metric = row["metric"]
        at_all = metric in ("nll_as_trained", "unigram_nll")
        for length in LENGTHS if at_all else [int(row["length"])] if row["length"] else []:
            one = found.setdefault((row["variant"], length), {})
            one |= {
                metric: row["value"],
                f"{metric}_low": row["low"],
                f"{metric}_high": row["high"],
            }
            one |= {"verdict": row["verdict"]} if metric == "delta" else {}
    return found


def ends_of(expected: dict, name: str, mean: float, half: float) -> None:
    expected |= {f"{name}_low": mean - half, f"{name}_high": mean + half}


def upper_of(shift: np.ndarray) -> float:
    return shift.mean() if not shift.any() else sum(two_way(shift))


def test_every_derived_column_of_the_tables_by_hand():
    record = results()
    comparison = derived(record)
    study = read_study(record)

    def cells(table):
        texts = [[getattr(one, "text", one) for one in row] for row in table.rows]
        return {row[0]: dict(zip(table.columns, row, strict=True)) for row in texts}

    def with_ends(values, family=1):
        mean, half = two_way(values, family)
        return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]".replace("-", "−")

    base = raw(record, "none", "trained", L0)
    last = raw(record, "none", "trained", 4096)
    unigram = np.mean(record["cells"][0]["evaluations"]["long"]["unigram_unit_nll"])
    pooled = np.average(base, axis=1, weights=comparison.losses.targets).mean()
    row = cells(tables.overview(comparison))["none"]
    assert row["seeds"] == "3" and row["NLL at 256"] == f"{base.mean():.3f}"
    assert (
        row["below unigram"] == f"{unigram - base.mean():+.2f}"
        and row["bits per byte"] == f"{pooled / 2.3:.3f}"
    )
    assert (row["held to"], row["broken at"], row["longest length"]) == ("—", "512", "4,096")
    assert row["change at longest"] == with_ends(last - base, 9 * 4 - 4)
    assert row["gain over truncation"] == with_ends(base - last)
    assert cells(tables.gains(comparison))["none"]["4,096"] == with_ends(base - last)
    verdict = cells(tables.verdicts(comparison))["none"]["4,096"]
    assert verdict == f"✗ broken {with_ends(last - base, 9 * 4 - 4)}"
    mean, half = two_way(last)
    assert cells(tables.levels(comparison))["none"]["4,096"] == f"{mean:.3f} ± {half:.3f}"
    before = raw(record, "none", "trained", 2048)
    assert cells(tables.steps(comparison))["none"]["2,048 → 4,096"] == with_ends(before - last)
    yarn = raw(record, "rope", "yarn", 4096) - raw(record, "rope", "trained", 4096)
    assert cells(tables.differences(comparison))["rope + yarn"]["4,096"] == with_ends(yarn, 16)
    rope = cells(tables.costs(study, GROUP, comparison))["rope"]
    assert rope["parameters"] == "1,245,097" and rope["tokens"] == "2,048,000"  # of cells 0, 1, 2
    assert rope["training FLOPs"] == "1.66e+13" and rope["FLOPs per token"] == "8.1e+06"
    assert (
        rope["tokens/s"] == "5,990"
        and rope["seconds"] == "301"
        and rope["last training loss"] == "4.610"
    )
    assert rope["peak memory, MiB"] == f"{9e8 / 2**20:.0f}"
    rows = tables.seen_units(derived(results(seen=2))).rows
    (row,) = [row for row in rows if row[0] == "rope" and "not in" in row[1]]
    inside = raw(results(seen=2), "rope", "trained", 4096)[:, 2:]
    assert row[2] == "7" and row[6] == f"{inside.mean():.3f}"


def test_bits_per_byte_are_missing_without_byte_counts():
    record = results(schemes=("rope", "none"))
    for cell in record["cells"]:
        for row in cell.get("evaluations", {}).get("long", {}).get("cells", []):
            row["bits_per_byte"] = None
    table = tables.overview(derived(record))
    column = table.columns.index("bits per byte")
    assert {getattr(row[column], "text", row[column]) for row in table.rows} == {"—"}
