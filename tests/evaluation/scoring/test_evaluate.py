import json
from types import SimpleNamespace

import numpy as np
import pytest

from errors import EvaluationError
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.reports.loss_report import loss_report
from evaluation.scoring import evaluate as matrix
from evaluation.scoring.methods import new_sinks, resolve_methods
from evaluation.scoring.text import EvaluationText
from evaluation.statistics.analysis import analyze
from tests.evaluation.conftest import BUILTIN


class Console:
    def __init__(self):
        self.lines = []
        self.advanced = 0.0

    def info(self, text):
        self.lines.append(text)

    def warn(self, text):
        self.lines.append(f"warning: {text}")

    def bar(self, label, total, unit):
        self.total = total
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def advance(self, n=1):
        self.advanced += n


def test_every_method_and_length_uses_same_targets(do):
    result = do()
    assert set(result.nll) == {
        (r, n) for r in ("trained", "truncate", "yarn", "window") for n in (16, 32, 64)
    }
    assert {len(v) for v in result.nll.values()} == {7 * 2 * 5}
    # Truncation is flat by construction; yarn and the window leave the trained length alone.
    for length in (16, 32, 64):
        assert (result.nll["truncate", length] == result.nll["trained", 16]).all()
    for method in ("yarn", "window"):
        assert np.abs(result.nll[method, 16] - result.nll["trained", 16]).max() < 1e-5
        assert np.abs(result.nll[method, 64] - result.nll["trained", 64]).max() > 1e-2


def test_finished_cells_are_not_measured_again(do, subject):
    first = do()
    subject.used.clear()
    console = Console()
    again = do(console)
    assert not subject.used and "9 of 9 cells" in console.lines[0]
    assert all((first.nll[k] == again.nll[k]).all() for k in first.nll)
    # A shorter length and another method are added; what is there stays.
    console = Console()
    more = do(console, lengths=[16, 24, 32, 64])
    assert "9 of 12" in console.lines[0] and set(more.nll) > set(first.nll)
    assert more.plan.hash == first.plan.hash
    # Another seed is other targets.
    console = Console()
    do(console, seed=1)
    assert not any("reused" in line for line in console.lines)


def test_a_damaged_cell_is_measured_again(do, subject, tmp_path):
    first = do()
    victim = sorted((tmp_path / "cells").glob("*.npz"))[2]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 255
    victim.write_bytes(bytes(data))
    subject.used.clear()
    again = do()
    assert len(subject.used) == 1
    assert all((first.nll[k] == again.nll[k]).all() for k in first.nll)


def test_an_interrupt_keeps_what_is_finished(do, subject):
    want = do(seed=3)

    class Impatient(Console):
        def advance(self, n=1):
            super().advance(n)
            if self.advanced > 0.6 * self.total:
                raise KeyboardInterrupt

    want = {k: v.copy() for k, v in want.nll.items()}
    console = Impatient()
    with pytest.raises(KeyboardInterrupt):
        do(console, batch=1)
    console = Console()
    resumed = do(console, batch=1)
    assert "cells are already done" in console.lines[0]
    fresh = do(chunk=4095, batch=1)
    assert all((resumed.nll[k] == fresh.nll[k]).all() for k in want)


def test_a_time_limit_scores_document_by_document(do, subject, monkeypatch):
    """14 windows of 7 documents: five turns of the seven distinct cells finish two documents."""
    clock = {"left": 5 * 7 + 1}

    def monotonic():
        clock["left"] -= 1
        return 0.0 if clock["left"] >= 0 else 1e9

    monkeypatch.setattr("evaluation.scoring.evaluate.time", SimpleNamespace(monotonic=monotonic))
    part = do(minutes=1, seed=3)
    documents = np.unique(part.plan.truncated.document)
    assert (
        np.unique(part.document).tolist() == documents[:2].tolist() and "2 of 7" in part.notes[-1]
    )
    assert len(part.document) == len(part.unit) == len(part.unigram) == 2 * 2 * 5
    monkeypatch.undo()
    subject.used.clear()
    whole = do(minutes=60, seed=3)
    console = Console()
    assert len(subject.used) == 3 and set(np.unique(whole.document)) == set(documents)
    for where, nll in part.nll.items():
        assert (nll == whole.nll[where][: 2 * 2 * 5]).all()
    subject.used.clear()
    plain = do(console, seed=3)  # all cells are complete, whichever way they were measured
    assert (
        "9 of 9 cells" in console.lines[0]
        and not subject.used
        and plain.plan.hash == whole.plan.hash
    )
    fresh = do(seed=3, chunk=4095)
    for where, nll in fresh.nll.items():
        assert np.abs(whole.nll[where] - nll).max() < 1e-5


def test_a_time_limit_skips_all_cells_of_one_file_when_it_fails(do, monkeypatch):
    """At the trained length, yarn and the window share the cell of the trained model."""

    def measured(scorer, text, windows):
        if scorer.length == 16:
            raise matrix.CellFailed("not finite")
        return measure(scorer, text, windows)

    measure = matrix.measure
    console = Console()
    monkeypatch.setattr(matrix, "measure", measured)
    result = do(console, minutes=60)
    assert set(result.failed) == {(label, 16) for label in ("trained", "yarn", "window")}
    assert set(result.nll) == {
        (label, n) for label in ("trained", "yarn", "window") for n in (32, 64)
    }
    assert len(result.document) == 7 * 2 * 5
    assert sum(line.startswith("warning") for line in console.lines) == 3


def test_progress_adds_up_and_the_forecast_comes_first(do):
    console = Console()
    do(console)
    # Nine cells, of which yarn and the window share that of the trained length with the trained
    # model.
    assert console.lines[0].startswith("forecast: 7 cells") and "peak memory" in console.lines[0]
    assert console.advanced == pytest.approx(console.total, rel=1e-9)


def test_sinks_are_rejected_for_models_trained_with_bos(do, subject, monkeypatch):
    sinks = ["model.position.window=12", "model.position.sinks=4"]
    monkeypatch.setitem(BUILTIN, "streaming", sinks)
    subject.bos_first = "It was trained so"
    with pytest.raises(EvaluationError, match=r"streaming: .*trained so.*bos=every-window"):
        do(methods=("trained", "streaming", "window"))
    assert not subject.used
    do(methods=("trained", "window"))  # without sinks, any BOS rule will do
    windowed = {"name": "rope", "window": 12, "sinks": 4}
    assert new_sinks(windowed, {"name": "rope"}) and not new_sinks(windowed, windowed)
    kinds = {"kinds": {"a": windowed, "b": {"name": "none"}}}
    assert new_sinks(kinds, {"kinds": {"a": {"name": "rope", "sinks": 0}, "b": {"name": "none"}}})
    assert not new_sinks(kinds, kinds)


def test_bits_per_byte_are_omitted_for_lossy_tokenization(do, make_store, tokenizer):
    store = make_store([90, 120, 75, 99, 130, 81, 77], seed=1)
    pieces = tokenizer.token_bytes
    store.bytes = np.array([sum(pieces[i] for i in document) for document in store.documents])
    result = do(store=store)
    ids = result.plan.target_ids(EvaluationText(store))
    assert result.n_bytes == sum(pieces[i] for i in ids) > len(ids)
    cell = next(row for row in analyze(result).rows if row.length == 64 and row.method == "trained")
    nats = result.nll["trained", 64].sum()
    assert cell.bits_per_byte == pytest.approx(nats / np.log(2) / result.n_bytes, rel=1e-12)
    store.bytes[3] += 1  # a byte of this document stands behind no token
    assert do(store=store).n_bytes is None


def test_oversized_length_error_suggests_length(do):
    with pytest.raises(
        EvaluationError, match=r"length 64 needs about .* length (\d+) would fit"
    ) as caught:
        do(memory=0.00008)
    fits = int(str(caught.value).split(" would fit")[0].split()[-1])
    assert 5 <= fits < 64
    do(memory=0.00008, lengths=[16, fits])


def test_a_non_finite_cell_fails_alone(do, subject, monkeypatch):
    under = subject.under

    def broken(overrides, dtype="float32"):
        model = under(overrides, dtype)
        model.norm.weight.data.fill_(float("inf") if "yarn" in str(overrides) else 1.0)
        return model

    monkeypatch.setattr(subject, "under", broken)
    console = Console()
    result = do(console)
    # at 16 it shares the cell of the trained model
    assert set(result.failed) == {("yarn", 32), ("yarn", 64)}
    assert ("window", 64) in result.nll and any("skipped" in line for line in console.lines)
    assert any("yarn at 32" in line for line in loss_report(result, analyze(result)).caveats)


@pytest.mark.parametrize("protocol", ["sliding", "non-overlapping", "by-position"])
def test_other_protocols_end_to_end(do, protocol, tmp_path):
    result = do(protocol=protocol)
    analysis = analyze(result)
    files = loss_report(result, analysis).write(tmp_path / "out")
    assert all(file.stat().st_size > 400 for file in files) and len(files) == 4
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (
        report["protocol"] == protocol
        and report["summary"]
        and report["targets"] == result.plan.n_targets
    )
    if protocol == "by-position":
        assert set(report["by_position"]) == {"trained", "yarn", "window"}
        last = report["by_position"]["trained"][-1]
        assert (last["low"], last["high"]) == (32, 64)
        # Where the context is not cut, as trained is its own baseline.
        assert report["by_position"]["trained"][0]["gain"]["estimate"] == pytest.approx(0, abs=1e-6)


def test_bfloat16_is_checked_against_float32_before_a_verdict(do):
    result = do(dtype="bfloat16", methods=["trained", "truncate", "yarn"])
    assert set(result.precision) == {(r, n) for r in ("trained", "yarn") for n in (16, 32, 64)}
    assert max(abs(v) for v in result.precision.values()) > 0
    worst = max(abs(v) for v in result.precision.values())
    # Verdicts depend on the tolerance they are asked at: withheld below ten times the error.
    strict = analyze(do(dtype="bfloat16", methods=["trained", "truncate", "yarn"], tolerance=worst))
    assert any("no verdict" in note for note in strict.notes)
    loose = analyze(
        do(
            dtype="bfloat16",
            methods=["trained", "truncate", "yarn"],
            tolerance=max(1.0, 11 * worst),
        )
    )
    assert not loose.notes and len(loose.verdicts) == 2


def test_methods_and_overrides(builtin_methods):
    methods = resolve_methods(["yarn", "window"], builtin_methods, 48)
    assert [r.label for r in methods] == ["trained", "yarn", "window"]
    assert methods[2].overrides == ("model.position.window=48",)
    less = resolve_methods(
        {"mine": ["a={train_length-4}", "b={train_length} {train_length-10}"]}, builtin_methods, 48
    )
    assert less[1].overrides == ("a=44", "b=48 38")
    own = resolve_methods({"truncate": [], "mine": ["a.b=1"]}, builtin_methods, 48)
    assert [(r.label, r.overrides) for r in own] == [
        ("trained", ()),
        ("truncate", ()),
        ("mine", ("a.b=1",)),
    ]
    with pytest.raises(EvaluationError, match=r"unknown method 'yarm'.*alibi, trained"):
        resolve_methods(["yarm"], builtin_methods, 48)
    with pytest.raises(EvaluationError, match="trained"):
        resolve_methods({"trained": ["x=1"]}, builtin_methods, 48)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"lengths": []}, "at least one"),
        ({"lengths": [0, 5]}, "positive"),
        ({"lengths": [32]}, "shorter than a span"),
        ({"methods": []}, "methods is empty"),
        ({"folder": "../x"}, "pattern"),
        ({"spans": 3}, "Extra inputs"),
    ],
)
def test_invalid_settings_are_rejected(bad, message):
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**bad)
