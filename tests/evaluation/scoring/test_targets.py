from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import EvaluationError
from evaluation.scoring.targets import (
    draw_targets,
    reaches,
)
from evaluation.scoring.text import EvaluationText

HASHES = {"corpus_hash": "c", "tokenizer_hash": "t"}
LENGTHS = [40, 75, 76, 77, 78, 120, 300, 33]


def bare(lengths, excluded=()):
    """A text of which only the lengths are known; `excluded`: (document, first, last)."""
    store = SimpleNamespace(lengths=np.array(lengths), has_bos=False, has_eos=False)
    return EvaluationText(store, "none", excluded=np.array(excluded, dtype=np.int64).reshape(-1, 3))


def draw(text, longest=64, span=5, spans=3, **kw):
    return draw_targets(
        text, **(HASHES | {"longest": longest, "span": span, "spans_per_document": spans} | kw)
    )


@pytest.mark.parametrize("method", ["as-trained", "none", "every-window"])
@pytest.mark.parametrize("bos", [True, False])
def test_spans_are_disjoint_equally_many_and_have_full_context(make_store, method, bos):
    store = make_store(LENGTHS, bos=bos)
    text = EvaluationText(store, method, 1)
    targets = draw(text)
    documents, counts = np.unique(targets.document, return_counts=True)
    assert set(counts) == {3} and len(documents) >= 4
    for document in documents:
        ends = targets.end[targets.document == document]
        assert ends.min() >= 64 + 1 and ends.max() <= text.lengths[document]
        assert (np.diff(ends) >= 5).all()


def test_bos_and_eos_are_never_targets_and_bos_displaces_the_oldest_token(make_store):
    store = make_store([90, 95], bos=True, eos=True)
    raw = store.document(1)[1:-1].astype(np.int64)
    for method in ("as-trained", "none", "every-window"):
        text = EvaluationText(store, method, 1)
        targets = draw(text, longest=20, span=6, spans=8)
        windows = text.windows(targets.document, targets.end, 20)
        assert windows.shape == (16, 21)
        assert not np.isin(windows[:, -6:], [1, 2]).any()
        last = targets.document == 1
        shift = 0 if method == "none" else 1
        for row, end in zip(windows[last], targets.end[last], strict=True):
            assert (row[1:] == raw[end - 20 - shift : end - shift]).all()
            if method == "every-window":
                assert row[0] == 1


def test_sampling_depends_only_on_arguments(make_store):
    text = EvaluationText(make_store(LENGTHS))
    base = draw(text)
    assert draw(EvaluationText(make_store(LENGTHS))).hash == base.hash
    changes = {"longest": 63, "span": 4, "spans": 2, "seed": 1, "documents": 2}
    changes |= {"corpus_hash": "d", "tokenizer_hash": "u"}
    hashes = {base.hash, *(draw(text, **{key: changes[key]}).hash for key in changes)}
    hashes.add(draw(EvaluationText(make_store(LENGTHS), "none")).hash)
    assert len(hashes) == len(changes) + 2


def test_golden_spans(make_store):
    # Pinned: numbers already published must not move with a refactoring.
    targets = draw(EvaluationText(make_store(LENGTHS)))
    assert targets.document.tolist() == np.repeat(np.arange(1, 7), 3).tolist()
    assert targets.end.reshape(6, 3).tolist() == [
        [65, 71, 76],
        [65, 71, 76],
        [66, 71, 76],
        [66, 73, 79],
        [83, 90, 97],
        [97, 266, 288],
    ]


def test_too_few_documents_error_suggests_longest_length(make_store):
    text = EvaluationText(make_store(LENGTHS))  # with BOS the longest has 301 tokens
    with pytest.raises(EvaluationError, match=r"0 of 8 \(0\.0%\).*longest usable length is 290"):
        draw(text, longest=400)
    draw(text, longest=290)
    with pytest.raises(EvaluationError, match="1 of 8"):
        draw(text, longest=290, least_documents=2)
    with pytest.raises(EvaluationError, match="0 of 8"):
        draw(text, longest=291)


@settings(max_examples=60, deadline=None)
@given(
    longest=st.integers(8, 40),
    span=st.integers(1, 8),
    spans=st.integers(1, 6),
    extra=st.integers(0, 30),
)
def test_minimum_document_length_is_exact(longest, span, spans, extra):
    need = longest + 1 + (spans - 1) * span
    text = bare([need + extra, need - 1])
    targets = draw(text, longest=longest, span=span, spans=spans)
    assert (targets.document == 0).all() and len(targets.end) == spans
    assert targets.end.min() >= longest + 1 and targets.end.max() <= need + extra
    assert (np.diff(targets.end) >= span).all()


def test_placements_are_uniform_outside_excluded_ranges():
    # Spans of 2 from token 9 on; clean are [9, 13) and [15, 18): two spans in the first, or one in
    # each.
    text = bare([18], [(0, 0, 4), (0, 13, 14)])
    counts = {}
    for seed in range(3500):
        ends = tuple(draw(text, longest=10, span=2, spans=2, seed=seed).end.tolist())
        counts[ends] = counts.get(ends, 0) + 1
    assert set(counts) == {(11, 13), *((a, b) for a in (11, 12, 13) for b in (17, 18))}
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 22.46  # 99.9%, 6 degrees of freedom


@settings(max_examples=60, deadline=None)
@given(
    excluded=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), max_size=5),
    span=st.integers(1, 6),
    spans=st.integers(1, 5),
)
def test_spans_avoid_excluded_ranges(excluded, span, spans):
    marks = np.zeros(80, dtype=bool)
    for start, size in excluded:
        marks[start : start + size] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks.astype(int), [0]]))).reshape(-1, 2)
    text = bare([80, 80], [(0, start, end - 1) for start, end in edges.tolist()])

    def room(longest):  # packed greedily from the left
        at = longest + 1 - span
        fitting = 0
        while at + span <= 80:
            at, fitting = (
                (at + 1, fitting) if marks[at : at + span].any() else (at + span, fitting + 1)
            )
        return fitting >= spans

    targets = draw(text, longest=20, span=span, spans=spans)
    assert set(targets.document.tolist()) == ({0, 1} if room(20) else {1})
    ends = targets.end[targets.document == 0]
    assert (np.diff(ends) >= span).all() and (ends >= 21).all() and (ends <= 80).all()
    assert not any(marks[end - span : end].any() for end in ends)
    # The document without any is drawn from as if there were none in the other.
    plain = draw(bare([80, 80]), longest=20, span=span, spans=spans)
    assert (targets.end[targets.document == 1] == plain.end[plain.document == 1]).all()
    with_room = [longest for longest in range(span, 80) if room(longest)]
    assert with_room == [*range(span, reaches(text, span, spans)[0] + 1)]


def test_too_little_clean_text_error_suggests_longest_length():
    text = bare([120, 90], [(0, 70, 119), (1, 60, 89)])
    with pytest.raises(EvaluationError, match=r"longest usable length is 69\b"):
        draw(text, longest=70, spans=1)
    with pytest.raises(EvaluationError, match=r"longest usable length is 49\b"):
        draw(text, longest=70, least_documents=2)
