import csv
import json

import numpy as np
import pytest
from scipy import stats

from evaluation import analyse
from evaluation.records import write
from evaluation.report import parts_table, words


def test_results_hold_every_unit_and_whether_the_training_text_has_it(do, make_store, tmp_path):
    clusters = ["ann", "ann", "bob", None, "cy", "cy", None]
    store = make_store([90, 120, 75, 99, 130, 81, 77], seed=1, clusters=clusters)
    train = make_store([300, 40], seed=2, clusters=["cy", "doc3"])
    result = do(store=store, train=train)
    write(result, analyse(result), tmp_path)
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["units"] == {
        "kind": "cluster",
        "names": ["ann", "bob", "cy", "doc3", "doc6"],
        "targets": [20, 10, 20, 10, 10],
        "seen": [False, False, True, False, False],  # a document's name is no cluster
    }
    of = [[0, 1], [2], [4, 5], [3], [6]]  # documents in the order of the units, each with 10 targets
    for cell in report["cells"]:
        nll = result.nll[cell["rule"], cell["length"]].reshape(7, 10)
        assert cell["unit_nll"] == pytest.approx([nll[documents].mean() for documents in of])
    unigram = result.unigram.reshape(7, 10)
    assert report["unigram_unit_nll"] == pytest.approx([unigram[documents].mean() for documents in of])
    truncated = result.truncated.reshape(7, 10)
    assert report["truncated_unit_nll"] == pytest.approx([truncated[documents].mean() for documents in of])


def test_units_of_the_training_text_are_shown_apart(do, make_store, tmp_path):
    names = [f"author {i // 2}" for i in range(14)] + ["known"] * 2
    store = make_store([75 + 3 * i for i in range(16)], seed=1, clusters=names)
    train = make_store([300, 40], seed=2, clusters=["known", "author 3"])
    result = do(store=store, train=train, rules=["trained", "truncate", "yarn"])
    analysis = analyse(result)
    unseen, seen = analysis.parts
    assert (unseen.seen, unseen.units, unseen.documents, unseen.n_targets) == (False, 6, 12, 120)
    assert (seen.seen, seen.units, seen.documents, seen.n_targets) == (True, 2, 4, 40)
    new = [d for d in range(14) if d // 2 != 3]
    row = next(row for row in unseen.rows if (row.rule, row.length) == ("yarn", 64))
    means = result.nll["yarn", 64].reshape(16, 10)[new].reshape(6, 20).mean(axis=1)
    base = result.nll["trained", 16].reshape(16, 10)[new].reshape(6, 20).mean(axis=1)
    assert row.nll == pytest.approx(means.mean())
    half = stats.t.ppf(1 - 0.025 / 4, 5) * stats.sem(means - base)  # simultaneous over 2 rules at 2 lengths
    assert row.delta.estimate == pytest.approx((means - base).mean()) and row.delta.half == pytest.approx(
        half
    )
    assert row.verdict is None and all(np.isnan(row.level.low) for row in seen.rows)
    text = "\n".join(words(result, analysis))
    assert "6 clusters (12 documents) not in the training text: as trained NLL" in text
    assert "2 clusters (4 documents) in the training text, points only: as trained NLL" in text
    _, columns, lines = parts_table(result, analysis)
    assert [line[:2] for line in lines] == [
        *(["trained", str(n)] for n in (16, 32, 64)),
        ["truncate", "all"],
        *(["yarn", str(n)] for n in (16, 32, 64)),
    ]
    assert all(len(line) == len(columns) == 6 for line in lines)
    write(result, analysis, tmp_path)
    report = json.loads((tmp_path / "results.json").read_text())
    assert set(report["parts"]) == {"unseen", "seen"} and report["parts"]["unseen"]["units"] == 6
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [sum(row["part"] == part for row in rows) for part in ("all", "unseen", "seen")] == [9, 9, 9]
    assert {row["units"] for row in rows if row["part"] == "seen"} == {"2"}


def test_reach_and_ratios_are_said_and_kept(do, tmp_path):
    result = do(rules=["trained", "truncate", "window"])
    analysis = analyse(result)
    assert [one.rule for one in analysis.reaches] == ["trained", "window"]
    text = "\n".join(words(result, analysis))
    assert "Context reach, as trained: " in text and "Gain per doubling, nats: 16 to 32 " in text
    write(result, analysis, tmp_path)
    report = json.loads((tmp_path / "results.json").read_text())
    cells = {(cell["rule"], cell["length"]): cell for cell in report["cells"]}
    reach = {one["rule"]: one for one in report["context_reach"]}["trained"]
    assert reach["longest"] == 64 and [(d["from"], d["to"]) for d in reach["gain_per_doubling"]] == [
        (16, 32),
        (32, 64),
    ]
    cell, last = cells["trained", 64], reach["gain_per_doubling"][1]
    assert last["gain"] == pytest.approx(cells["trained", 32]["nll"] - cell["nll"])
    assert cell["gain_per_doubling"] == last["gain"] and cells["trained", 16]["gain_per_doubling"] is None
    assert cell["perplexity_ratio"] == pytest.approx(cell["perplexity"] / cells["trained", 16]["perplexity"])
    assert cell["perplexity_ratio_low"] == pytest.approx(np.exp(cell["delta_low"]))
    assert not analyse(do(protocol="non-overlapping")).reaches


def test_verdicts_can_share_their_level_by_max_t(do):
    plain, joint = (analyse(do(simultaneous=how)) for how in ("bonferroni", "max-t"))
    one, other = plain.verdicts[1].verdicts[-1].delta, joint.verdicts[1].verdicts[-1].delta
    assert one.estimate == other.estimate and one.half != other.half and joint.family == plain.family == 6
    assert "simultaneous over 6 comparisons (max-t)" in "\n".join(words(do(simultaneous="max-t"), joint))
