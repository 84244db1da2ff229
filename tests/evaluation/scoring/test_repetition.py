"""Repeated targets and their controls, against definitions written out token by token."""

import numpy as np
import pytest
from scipy import stats

from errors import EvaluationError
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.reports.loss_results_json import read_gains
from evaluation.scoring.repetition import ControlText, draw_repeats, find_repeats
from evaluation.scoring.targets import EvaluationText
from tests.evaluation.conftest import BOS, EOS, MemoryStore, MemoryTokenizer, loss_session

N = 3  # tokens before a target
SCORER = "evaluation.scoring.text_loss.ModelScorer"
LENGTHS = (16, 32, 64, 128)
# of the repetitions of every document; 8, 16 and 64 begin octaves, 63 ends one
DISTANCES = (5, 8, 16, 20, 30, 33, 47, 63, 64, 70, 115)


@pytest.fixture(scope="module")
def store():
    """Documents of distinct ids, but for one repetition of 5 tokens at each of the distances."""
    documents = []
    for document in range(7):
        ids = 2000 * (document + 1) + np.arange(1900)
        at = 140
        for distance in np.random.default_rng(document).permutation(DISTANCES):
            ids[at : at + 5] = ids[at - distance : at - distance + 5]
            at += 150
        documents.append(np.concatenate([[BOS], ids, [EOS]]))
    store = MemoryStore([1] * len(documents))
    store.documents = documents
    store.lengths = np.array([len(ids) for ids in documents])
    return store


def by_definition(tokens, n):
    """(target, distance) pairs: the n-gram before occurred once, and was continued alike."""
    tokens = tokens.tolist()
    found = []
    for t in range(n, len(tokens)):
        gram = tokens[t - n : t]
        before = [p for p in range(n, t) if tokens[p - n : p] == gram]
        if len(before) != 1:
            continue
        distance = t - before[0]
        if tokens[before[0]] == tokens[t] and distance > n:
            found.append([t, distance])
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_repeats_by_definition(n):
    rng = np.random.default_rng(n)
    for size in (0, 1, 2 * n, 2 * n + 2, 60, 300):
        for vocabulary in (1, 2, 4, 50):
            tokens = rng.integers(0, vocabulary, size)
            if size == 300:  # a long repetition, which overlaps another one
                tokens[200:260] = tokens[30:90]
                tokens[250:280] = tokens[245:275]
            found = np.transpose(find_repeats(tokens, n)).tolist()
            assert found == by_definition(tokens, n)


def drawn(text, documents=7, **options):
    asked = {"longest": 128, "most": 64, "per_document": 4, "ngram": N, "spec": {"seed": 0}}
    return draw_repeats(text, np.arange(documents), **asked | options)


@pytest.mark.parametrize("bos", ["as-trained", "none", "every-window"])
def test_known_repetitions_are_targets_and_only_they_are_replaced(store, bos):
    text = EvaluationText(store, bos, BOS)
    targets = drawn(text)
    known = {(document, d) for document in range(7) for d in DISTANCES}
    # The last two tokens of each repetition; at the distance of 5 they fit before their copy.
    assert set(zip(targets.document.tolist(), targets.distance.tolist(), strict=True)) == known
    assert (targets.keep == 2).all()
    assert len(targets.end) == len(known)
    for length in LENGTHS:
        windows = targets.windows(length)
        document, end, *_ = windows.T
        read = text.windows(document, end, length)
        control = ControlText(text, targets).windows(document, end, length)
        readable = targets.is_readable(length).reshape(-1, 2)
        changed = targets.is_changed(length)
        for group, (before, after) in enumerate(zip(read, control, strict=True)):
            d = targets.distance[group]
            inputs = before[:-1].tolist()
            for k in range(2):
                phrase = before[len(before) - 2 + k - N : len(before) - 1 + k].tolist()
                starts = [i for i in range(length - d) if inputs[i : i + N + 1] == phrase]
                # the first input is not counted, as it may be BOS
                fits = length - d - N - 2 + k >= 0
                assert fits == (starts[:1] > [0])
                assert readable[group, k] == fits
            differs = np.flatnonzero(before != after)
            place = np.arange(len(before) - 5 - d, len(before) - d)
            place = place[place >= (bos == "every-window")]
            assert differs.tolist() == place.tolist()
            assert changed[group] == bool(len(place)) or bos == "every-window"
            # from another document
            assert not len(place) or set(after[place] // 2000) != {targets.document[group] + 1}


def test_the_draw(store):
    text = EvaluationText(store)
    targets = drawn(text)
    assert drawn(text).record == targets.record
    assert drawn(text, spec={"seed": 1}).source.tolist() != targets.source.tolist()
    # Octaves of distances share nothing; [64, 128) holds three of them.
    few = drawn(text, per_document=1)
    octaves = np.log2(few.distance).astype(int).tolist()
    pairs = list(zip(few.document.tolist(), octaves, strict=True))
    assert len(pairs) == 7 * 5
    assert len(set(pairs)) == 7 * 5
    # A window holds the whole earlier occurrence: 3 + 2 tokens.
    assert drawn(text, longest=75).distance.max() == 70
    assert drawn(text, longest=74).distance.max() == 64
    # Text that must not be scored is no target; what it repeats may be.
    row = [(3, int(targets.end[targets.document == 3][0]), 10**6)]  # all but the first repetition
    fewer = drawn(EvaluationText(store, excluded=np.array(row)))
    assert (fewer.document == 3).sum() == 1
    assert len(fewer.end) == len(targets.end) - 10
    with pytest.raises(EvaluationError, match=r"found no 6 tokens.*lower ngram"):
        drawn(text, ngram=6)


AT = 100  # where the edge cases below repeat


@pytest.mark.parametrize(
    ("size", "distance", "options", "expected"),
    [
        (20, 40, {}, (AT + 20, 17)),
        (20, 40, {"most": 16}, (AT + 19, 16)),  # its first targets
        (8, 5, {}, (AT + 5, 2)),  # three tokens before them and two targets fit into 5
        (7, 4, {}, (AT + 4, 1)),
        (7, 3, {}, None),
        (5, 40, {"longest": AT + 4}, (AT + 5, 2)),  # a window and its target are all tokens
        (5, 40, {"longest": AT + 5}, None),
        (6, 40, {"excluded": (AT + 3, AT + 3)}, (AT + 6, 2)),
        (6, 40, {"excluded": (AT + 5, AT + 5)}, (AT + 5, 2)),
    ],
)
def test_edges_of_a_repetition(size, distance, options, expected):
    """(end, targets) of a document that repeats `size` tokens once; the replacement is text of
    another document from its second token on, or of the same one if the other is too short."""
    options = {"longest": 90} | options
    excluded = np.array([(0, *options.pop("excluded"))] if "excluded" in options else ()).reshape(
        -1, 3
    )
    ids = np.arange(1000, 1300)
    for index in range(AT, AT + size):
        ids[index] = ids[index - distance]
    tokens = N + (expected or (0, 1))[1]
    for other, source in ((tokens + 1, 1), (tokens, 0)):
        store = MemoryStore([1, 1], bos=False, eos=False)
        store.documents = [ids, np.arange(5000, 5000 + other)]
        store.lengths = np.array([len(ids), other])
        text = EvaluationText(store, "none", excluded=excluded)
        if expected is None:
            with pytest.raises(EvaluationError, match="found no 3 tokens"):
                drawn(text, 1, **options)
            continue
        targets = drawn(text, 1, **options)
        assert (int(targets.end[0]), int(targets.keep[0]), len(targets.end)) == (*expected, 1)
        assert targets.source.tolist() == [source]
        assert source == 0 or targets.source_start.tolist() == [1]


@pytest.fixture
def measured(store, subject, tmp_path, monkeypatch):
    tokenizer = MemoryTokenizer()
    tokenizer.token_bytes = np.ones(20_000)

    def run(scorer, methods=("trained", "truncate", "yarn"), **settings):
        monkeypatch.setattr(SCORER, lambda *_, **__: scorer)
        asked = {"lengths": LENGTHS, "targets": 4, "spans_per_document": 3, "device": "cpu"}
        asked |= {"contamination": {"check": False}, "targets_by": "repetition", "ngram": N}
        settings = EvaluationSettings(methods=list(methods), **asked | settings)
        cells = tmp_path / "cells"
        return loss_session(settings, subject, store, cells, tokenizer=tokenizer)

    return run


def by_tokens(windows, keep):
    """Losses that depend on every token of the window."""
    mixed = (windows * np.arange(1, windows.shape[1] + 1) ** 2).sum(axis=1)
    return 1 + np.sin(mixed[:, None] + np.arange(keep)) ** 2


def test_read_gains_are_paired_differences_over_documents(measured):
    session = measured(by_tokens, methods=("trained", "truncate", "window"))
    result = session.run()
    cells = list(read_gains(result))
    repeats = session.plan.repeats
    assert len(cells) == 5 * 3 * len(LENGTHS)
    for bucket in cells:
        where = bucket["method"], bucket["length"]
        here = repeats.distance >= bucket["distance_low"]
        here &= repeats.distance < bucket["distance_high"]
        if bucket["method"] == "truncate":
            readable = repeats.is_readable(16).reshape(-1, 2)[here]
            assert bucket["readable"] == readable.sum()
        else:  # where nothing of a window is replaced, it is its own control
            assert (result.values_by_role["repeated"][where] == result.repeated[where]).all()
            changed = np.repeat(repeats.distance <= bucket["length"], 2)
            assert (result.values_by_role["control"][where] == result.control[where][changed]).all()
            assert ((result.repeated[where] == result.control[where]) == ~changed).all()
        nll, control = (x[where].reshape(-1, 2) for x in (result.repeated, result.control))
        assert bucket["nll"] == pytest.approx(nll[here].mean(), rel=1e-12)
        assert bucket["control_nll"] == pytest.approx(control[here].mean(), rel=1e-12)
        of = [here & (repeats.document == document) for document in range(7)]
        means = [(control - nll)[group].mean() for group in of]
        ends = stats.t.interval(0.95, 6, np.mean(means), stats.sem(means) or 1e-300)
        found = (bucket["read_gain"], bucket["read_gain_low"], bucket["read_gain_high"])
        assert found == pytest.approx((np.mean(means), *ends), abs=1e-12)
    # The cells of all targets are those of an evaluation without repeated text.
    plain = measured(by_tokens, methods=("trained", "window"), targets_by=None)
    assert {cell.file for cell in plain.cells()} < {cell.file for cell in session.cells()}
