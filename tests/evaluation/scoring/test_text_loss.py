import re

import numpy as np
import pytest
import torch

from errors import EvaluationError
from evaluation.methods import new_sinks, resolve_methods
from evaluation.reports.loss_report import loss_report
from evaluation.scoring.cells import CellStore, cell_file
from evaluation.scoring.targets import EvaluationText
from evaluation.scoring.text_loss import ModelScorer, raw_bytes, unigram_nll
from model import TokenPositions
from tests.tables import value

CELLS = [(label, n) for label in ("trained", "truncate", "yarn", "window") for n in (16, 32, 64)]


class Console:
    quiet = False

    def __init__(self, interrupt=1e9):
        self.lines = []
        self.advanced = 0.0
        self.interrupt = interrupt  # the share of the work after which it raises

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
        if self.advanced > self.interrupt * self.total:
            raise KeyboardInterrupt


def assert_equal(first, second):
    """The losses of two results."""
    assert first.keys() <= second.keys()
    assert all((nll == second[cell]).all() for cell, nll in first.items())


def test_finished_cells_are_not_measured_again(do, subject):
    first = do()
    subject.used.clear()
    console = Console()
    assert_equal(first.nll, do(console).nll)
    assert not subject.used
    assert "9 of 9 cells" in console.lines[0]
    # A length is added; what is there stays.
    console = Console()
    more = do(console, lengths=[16, 24, 32, 64])
    assert "9 of 12" in console.lines[0]
    assert set(more.nll) > set(first.nll)
    assert more.plan.hash == first.plan.hash
    # Another seed has other targets.
    console = Console()
    do(console, seed=1)
    assert not any("reused" in line for line in console.lines)


def test_flipped_bits_of_a_cell_are_found(tmp_path):
    """Every eleventh bit, in zip headers too, where Python raises errors of several classes."""
    store = CellStore(tmp_path)
    expected = np.arange(6.0)
    store.save({"a": 1}, expected)
    path = tmp_path / cell_file({"a": 1})
    intact = path.read_bytes()
    for bit in range(0, 8 * len(intact), 11):
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        loaded = store.load({"a": 1})
        assert loaded is None or np.array_equal(loaded, expected)


def test_interrupted_evaluation_resumes(do):
    with pytest.raises(KeyboardInterrupt):
        do(Console(interrupt=0.6), batch=1)
    console = Console()
    resumed = do(console, batch=1)
    assert "cells are already done" in console.lines[0]
    assert_equal(resumed.nll, do(chunk=4095, batch=1).nll)


def test_new_sinks_are_found_in_every_kind_of_layer():
    windowed = {"name": "rope", "window": 12, "sinks": 4}
    assert new_sinks(windowed, {"name": "rope"})
    assert not new_sinks(windowed, windowed)
    kinds = {"kinds": {"a": windowed, "b": {"name": "none"}}}
    assert new_sinks(kinds, {"kinds": {"a": {"name": "rope", "sinks": 0}, "b": {"name": "none"}}})
    assert not new_sinks(kinds, kinds)


def test_bits_per_byte_are_omitted_for_lossy_tokenization(do, make_store, tokenizer):
    store = make_store([90, 120, 75, 99, 130, 81, 77], seed=1)
    pieces = tokenizer.token_bytes
    store.bytes = np.array([sum(pieces[i] for i in document) for document in store.documents])
    result = do(store=store)
    spans = result.plan.truncated_windows.tolist()
    text = EvaluationText(store)
    ids = np.concatenate([text.slice(document, end - k, end) for document, end, _, k in spans])
    assert result.n_bytes == sum(pieces[i] for i in ids) > len(ids)
    bits = value(loss_report({"run": result}).results.table, "as trained", "bits_per_byte", 64)
    nats = result.nll["trained", 64].sum()
    assert bits == pytest.approx(nats / np.log(2) / result.n_bytes, rel=1e-12)
    store.bytes[3] += 1  # a byte of this document stands behind no token
    assert do(store=store).n_bytes is None


@pytest.mark.parametrize("bos", [True, False])
def test_an_inserted_space_is_no_byte_of_the_text(make_store, tokenizer, bos):
    tokenizer.prefix = b" "
    store = make_store([6, 5], bos=bos)
    sizes = [[int(tokenizer.token_bytes[i]) for i in document] for document in store.documents]
    store.bytes = np.array([sum(own) - 1 for own in sizes])
    text = EvaluationText(store)
    # All tokens that have context: with BOS, the first token of the text as well.
    index = [np.arange(1, length) for length in text.lengths]
    ids = [store.documents[d][own] for d, own in enumerate(index)]
    documents = np.repeat([0, 1], [len(own) for own in index])
    expected = sum(sum(own[1 : 1 + len(at)]) - bos for own, at in zip(sizes, index, strict=True))
    count = raw_bytes(np.concatenate(ids), documents, np.concatenate(index), text, tokenizer)
    assert count == expected


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
    assert ("window", 64) in result.nll
    assert any("skipped" in line for line in console.lines)
    assert any("yarn at 32" in line for line in loss_report({"run": result}).caveats)


def test_bfloat16_is_checked_against_float32_before_a_verdict(do):
    def evaluated(**settings):
        return do(dtype="bfloat16", methods=["trained", "truncate", "yarn"], **settings)

    result = evaluated()
    assert set(result.rounding_error) == {cell for cell in CELLS if cell[0] in ("trained", "yarn")}
    worst = max(abs(difference) for difference in result.rounding_error.values())
    assert worst > 0
    # Verdicts depend on the tolerance they are asked at: withheld below ten times the error.
    strict = loss_report({"run": evaluated(tolerance=worst)})
    assert strict.results.imprecise
    assert any("dtype=float32" in line for line in strict.caveats)
    none = loss_report({"run": evaluated(tolerance=1e-9)})
    assert not none.results.rows("delta") and "document" not in none.verdict
    loose = loss_report({"run": evaluated(tolerance=max(1.0, 11 * worst))}).results
    assert not loose.imprecise
    assert {row.variant for row in loose.rows("delta")} == {"as trained", "yarn"}


@pytest.mark.parametrize(
    "methods, expected",
    [
        (["window"], {"window": ("model.position.window=48",)}),
        ({"truncate": [], "mine": ["a.b=1"]}, {"truncate": (), "mine": ("a.b=1",)}),
        ({"mine": ["a={train_length-4} {train_length*2}"]}, {"mine": ("a=44 96",)}),
    ],
)
def test_methods_and_overrides(methods, expected):
    resolved = {r.label: r.overrides for r in resolve_methods(methods, 48)}
    assert list(resolved) == ["trained", *expected]
    assert resolved == {"trained": (), **expected}


def test_unknown_and_reserved_methods_are_refused():
    for methods, name in ((["yarm"], "yarm"), ({"trained": ["x=1"]}, "trained")):
        with pytest.raises(EvaluationError, match=name):
            resolve_methods(methods, 48)


@pytest.mark.parametrize("batch", [5, 4])
def test_a_non_finite_target_fails_the_cell_and_is_never_dropped(do, monkeypatch, batch):
    def broken(tokens, keep):
        out = np.ones((len(tokens), keep))
        if tokens.shape[1] == 33:
            out[-1, 2] = np.nan if batch == 5 else np.inf
        return out

    monkeypatch.setattr("evaluation.scoring.text_loss.ModelScorer", lambda *_, **__: broken)
    result = do(methods=["trained"], batch=batch)
    assert result.nll.keys() == {("trained", 16), ("trained", 64)}
    ((where, reason),) = result.failed.items()
    assert where == ("trained", 32)
    assert re.search(r"length 32, document doc\d", reason)


def test_scoring_restores_training_mode_and_gradients(sharp):
    model = sharp().train()
    tokens = torch.randint(3, 23, (2, 65))
    ModelScorer(model)(tokens.numpy(), 7)
    assert model.training
    # Tables that grew during the evaluation serve a training step afterwards.
    model(tokens[:, :-1], TokenPositions.plain(64), targets=tokens[:, 1:]).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_unigram_by_hand(make_store):
    store = make_store([6], seed=4)
    store.documents = [np.array([1, 5, 5, 7, 2], dtype=np.uint16)]
    store.lengths = np.array([5])
    got = unigram_nll(store, np.array([5, 7, 3]), 23)
    assert np.exp(-got) == pytest.approx([3 / 26, 2 / 26, 1 / 26])
    everything = np.exp(-unigram_nll(store, np.arange(23), 23))
    assert everything.sum() == pytest.approx(1)
