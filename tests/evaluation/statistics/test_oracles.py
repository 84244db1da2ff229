"""Every protocol, on models whose NLL is known in closed form.

The source: every token is, with probability COPY, the one 8 places before it, else any of the V.
Its true model has 8 tokens of memory: with at least 8 tokens in sight its NLL is that of the copy,
with fewer it is ln V. Expected per target with the memory in sight: ENTROPY.
"""

import math

import numpy as np
import pytest

from evaluation.evaluation_settings import EvaluationSettings
from evaluation.results_table import ResultsTable
from evaluation.scoring.plan import make_plan
from evaluation.scoring.scoring import batches, measure
from evaluation.scoring.text import EvaluationText
from evaluation.statistics.intervals import unit_means
from evaluation.statistics.verdicts import VerdictRules, add_verdicts, by_position

V = 20
MEMORY = 8
COPY = 0.7
LIKELY = COPY + (1 - COPY) / V
OTHER = (1 - COPY) / V
ENTROPY = -LIKELY * math.log(LIKELY) - (V - 1) * OTHER * math.log(OTHER)
BLIND = math.log(V)
GRID = (16, 32, 64, 128)


def oracle(windows, keep):
    """(n, keep) the source's own NLL of the last `keep` tokens of each window."""
    targets = np.arange(windows.shape[1] - keep, windows.shape[1])
    out = np.full((len(windows), keep), BLIND)
    seen = targets >= MEMORY
    same = windows[:, targets[seen]] == windows[:, targets[seen] - MEMORY]
    out[:, seen] = np.where(same, -math.log(LIKELY), -math.log(OTHER))
    return out


@pytest.fixture
def store(make_store):
    store = make_store([400, 391, 523, 460, 402, 388, 500, 431], bos=False)
    rng = np.random.default_rng(3)
    for document in store.documents:
        for t in range(len(document) - 1):
            if t >= MEMORY and rng.random() < COPY:
                document[t] = document[t - MEMORY]
            else:
                document[t] = rng.integers(3, 3 + V)
    return store


def measured(store, protocol, lengths=GRID, trained=16, **kw):
    text = EvaluationText(store)
    asked = EvaluationSettings(protocol=protocol, lengths=list(lengths), **kw)
    plan = make_plan(asked, text, store.hash, "t", trained)
    nll = {
        n: measure(oracle, text, windows, batches(windows, 9))
        for n, windows in plan.windows.items()
    }
    return text, plan, nll, measure(oracle, text, plan.truncated, batches(plan.truncated, 9))


def known(text, windows):
    """NLL of the counted targets with all of their document before them in sight, from the
    tokens."""
    out = []
    for document, index in zip(windows.target_documents(), windows.target_indices(), strict=True):
        tokens = text.slice(document, 0, index + 1)
        copied = index >= MEMORY and tokens[index] == tokens[index - MEMORY]
        out.append(-math.log(LIKELY if copied else OTHER) if index >= MEMORY else BLIND)
    return np.array(out)


def error(n):
    """Four standard errors of the mean over n targets."""
    second = LIKELY * math.log(LIKELY) ** 2 + (V - 1) * OTHER * math.log(OTHER) ** 2
    return 4 * math.sqrt((second - ENTROPY**2) / n)


def test_fixed_targets_with_limited_memory(store):
    k = 9
    lengths = (9, 10, 15, k + MEMORY - 1, 17, 40, 200)
    text, plan, nll, _ = measured(
        store, "fixed-targets", lengths, trained=k + MEMORY - 1, targets=k, spans_per_document=16
    )
    full = known(text, plan.truncated)
    assert len(full) == 8 * 16 * k and abs(full.mean() - ENTROPY) < error(len(full))
    for length in lengths:
        # the first so many of the K lack some of the memory
        blind = max(0, k + MEMORY - 1 - length)
        shown = nll[length].reshape(-1, k)
        assert (shown[:, :blind] == BLIND).all()
        assert (shown[:, blind:] == full.reshape(-1, k)[:, blind:]).all()
    # Verdicts of a flat curve: held everywhere, no break, and the length without the memory is no
    # better.
    unit = plan.truncated.target_documents()
    changes = {n: unit_means(nll[n] - nll[16], unit) for n in lengths if n >= 16}
    table = ResultsTable()
    add_verdicts(table, "o", changes, VerdictRules(16, 0.02))
    assert table.value("o", "held_to") == 200 and not table.select("break_point")
    assert all(row.low == row.value == row.high == 0 for row in table.select("delta"))


def test_non_overlapping_windows_with_limited_memory(store):
    text, plan, nll, _ = measured(store, "non-overlapping")
    full = known(text, plan.truncated)
    assert len(full) == (7 * 3 + 4) * 128  # one of the documents has four times 128 targets
    for length in GRID:
        at = plan.windows[length].target_positions()
        early = at + 1 < MEMORY
        assert early.sum() == len(full) // length * (MEMORY - 1)
        assert (nll[length] == np.where(early, BLIND, full)).all()
        expected = ENTROPY + (BLIND - ENTROPY) * (MEMORY - 1) / length
        assert abs(nll[length].mean() - expected) < error(len(full))
    # A model with 8 tokens of memory seems to gain by length: the early-token effect, and nothing
    # else.
    assert nll[16].mean() - nll[128].mean() > 0.8 * (BLIND - ENTROPY) * 7 * (1 / 16 - 1 / 128)


@pytest.mark.parametrize("stride", [1, 4, 9])
def test_sliding_windows_with_limited_memory(store, stride):
    text, plan, nll, _ = measured(store, "sliding", stride=stride)
    full = known(text, plan.truncated)
    assert len(full) == sum(text.lengths) - 8
    for length in GRID:
        # Only the first 7 targets of a document have less than 8 tokens before them, at any length.
        assert (nll[length] == full).all()
    expected = ENTROPY + (BLIND - ENTROPY) * 7 * 8 / len(full)
    assert abs(nll[16].mean() - expected) < error(len(full))


def test_by_position_with_limited_memory(store):
    text, plan, nll, truncated = measured(store, "by-position", lengths=(16, 128), targets=64)
    (windows,) = plan.windows.values()
    at = windows.target_positions()
    assert (nll[128][at < 7] == BLIND).all()
    assert (nll[128][at >= 7] == known(text, windows)[at >= 7]).all()
    # However many targets a span has, truncation to L0 = 16 leaves at least 3/4 of it: more than
    # the memory.
    assert (truncated == nll[128]).all()
    assert plan.truncated.target_positions()[at >= 16].min() == 16 - 4
    buckets = by_position(nll[128], truncated, at, windows.target_documents(), 0.05)
    assert [b.low for b in buckets] == [0, 1, 2, 4, 8, 16, 32, 64]
    expected = [BLIND, BLIND, BLIND, (3 * BLIND + ENTROPY) / 4, *[ENTROPY] * 4]
    for bucket, want in zip(buckets, expected, strict=True):
        assert abs(bucket.nll - want) <= (error(bucket.count) if want != BLIND else 1e-12)
        assert bucket.gain.estimate == 0
