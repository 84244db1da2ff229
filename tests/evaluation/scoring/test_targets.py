from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import EvaluationError
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.evaluation_plan import (
    block_windows,
    make_plan,
    position_windows,
    sliding_windows,
    truncated_windows,
    truncation_step,
)
from evaluation.scoring.targets import (
    EvaluationText,
    draw_targets,
    reaches,
    shorten_lengths,
    targets_of,
)

LENGTHS = [40, 75, 76, 77, 78, 120, 300, 33]


def bare(lengths, excluded=()):
    """A text of which only the lengths are known; `excluded`: (document, first, last)."""
    store = SimpleNamespace(lengths=np.array(lengths), has_bos=False, has_eos=False, hash="c")
    return EvaluationText(store, "none", excluded=np.array(excluded, dtype=np.int64).reshape(-1, 3))


def draw(text, longest=64, span=5, spans=3, corpus="c", **kw):
    text.store.hash = corpus
    asked = {"tokenizer_hash": "t", "longest": longest, "span": span, "spans_per_document": spans}
    return draw_targets(text, **asked | kw)


def test_sampling_depends_only_on_arguments(make_store):
    text = EvaluationText(make_store(LENGTHS))
    base = draw(text)
    assert draw(EvaluationText(make_store(LENGTHS))).hash == base.hash
    changes = {"longest": 63, "span": 4, "spans": 2, "seed": 1, "documents": 2}
    changes |= {"corpus": "d", "tokenizer_hash": "u"}
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
    with pytest.raises(EvaluationError, match=r"0 of 8 .*longest usable length is 290"):
        draw(text, longest=400)
    draw(text, longest=290)
    with pytest.raises(EvaluationError, match="1 of 8"):
        draw(text, longest=290, least_documents=2)
    with pytest.raises(EvaluationError, match="0 of 8"):
        draw(text, longest=291)


def test_placements_are_uniform_outside_excluded_ranges():
    # Spans of 2 from token 9 on; clean are [9, 13) and [15, 18): two spans in the first, or one in
    # each.
    text = bare([18], [(0, 0, 4), (0, 13, 14)])
    counts = {}
    for seed in range(3500):
        ends = tuple(
            draw(
                text,
                longest=10,
                span=2,
                spans=2,
                seed=seed,
            ).end.tolist()
        )
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
    steps = np.diff(np.concatenate([[0], marks.astype(int), [0]]))
    edges = np.flatnonzero(steps).reshape(-1, 2)
    text = bare([80, 80], [(0, start, end - 1) for start, end in edges.tolist()])

    def room(longest):  # packed greedily from the left
        at = longest + 1 - span
        fitting = 0
        while at + span <= 80:
            if marks[at : at + span].any():
                at += 1
            else:
                at += span
                fitting += 1
        return fitting >= spans

    targets = draw(text, longest=20, span=span, spans=spans)
    assert set(targets.document.tolist()) == ({0, 1} if room(20) else {1})
    ends = targets.end[targets.document == 0]
    assert (np.diff(ends) >= span).all()
    assert (ends >= 21).all()
    assert (ends <= 80).all()
    assert not any(marks[end - span : end].any() for end in ends)
    # The document without any is drawn from as if there were none in the other.
    plain = draw(bare([80, 80]), longest=20, span=span, spans=spans)
    assert (targets.end[targets.document == 1] == plain.end[plain.document == 1]).all()
    with_room = [longest for longest in range(span, 80) if room(longest)]
    assert with_room == [*range(span, reaches(text, span, spans)[0] + 1)]


def test_documents_that_just_have_room():
    """With 64 inputs and 5 targets, the first possible target is token 60."""
    assert shorten_lengths(np.array([16, 64, 64]), [16, 64, 128], 2)[0] == [16, 64]
    settings = EvaluationSettings(lengths=[16, 64], targets=5, spans_per_document=1)
    plan = make_plan(settings, bare([64, 65, 70]), "t", 16)
    assert plan.candidates.tolist() == [[1, 65, 64, 5], [2, 70, 69, 10]]
    document, index = targets_of(plan.candidates)
    assert document.tolist() == [1] * 5 + [2] * 10
    assert index.tolist() == [*range(60, 65), *range(60, 70)]


def placed(windows):
    return [(end, keep) for _, end, _, keep in windows.tolist()]


def test_placements_at_the_ends_of_documents():
    """(end, targets) of each window in documents of some tokens, by hand; lengths 4 and 8."""
    for tokens, stride, expected in (
        (5, 2, [(5, 4)]),
        (6, 2, [(5, 4), (6, 1)]),
        (7, 2, [(5, 4), (7, 2)]),
        (8, 2, [(5, 4), (7, 2), (8, 1)]),
        (9, 4, [(5, 4), (9, 4)]),
    ):
        sliding = sliding_windows(bare([tokens]), np.array([0]), 4, stride)
        assert placed(sliding) == expected
        assert targets_of(sliding)[1].tolist() == [*range(1, tokens)]
    for tokens, ends in ((8, []), (9, [5, 9]), (16, [5, 9]), (17, [5, 9, 13, 17])):
        blocks = block_windows(bare([tokens]), np.array([0]), 4, 8)
        assert placed(blocks) == [(end, 4) for end in ends]
    for tokens, ends in ((9, {9}), (11, {9, 10, 11})):
        windows = position_windows(bare([tokens]), np.array([0]), 8, 40, seed=0)
        assert set(windows[:, 1].tolist()) == ends
    # of 16 tokens every target keeps three quarters as context
    steps = [truncation_step(EvaluationSettings(targets=n), 16) for n in (3, 4, 5)]
    assert steps == [3, 4, 4]
    for inputs, expected in ((8, [(5, 4), (8, 3), (9, 1)]), (4, [(9, 4)]), (3, [(9, 3)])):
        whole = np.array([[0, 9, inputs, inputs]])
        assert placed(truncated_windows(whole, 4, 3)) == expected


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"protocol": "sliding", "stride": 17}, "stride=17"),
        ({"protocol": "sliding", "lengths": [16, 512]}, r"0 of 8.*longest usable length is 300"),
        ({"protocol": "non-overlapping", "lengths": [16, 48, 64]}, "48 does not divide 64"),
        ({"targets": 17}, "targets=17 "),
    ],
)
def test_plans_that_cannot_be_made_are_refused(make_store, asked, message):
    text = EvaluationText(make_store(LENGTHS))
    with pytest.raises(EvaluationError, match=message):
        make_plan(EvaluationSettings(**{"lengths": [16, 64]} | asked), text, "t", 16)
