import numpy as np
import pytest

from errors import EvaluationError
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.plan import make_plan
from evaluation.scoring.scoring import batches, measure
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import (
    block_windows,
    long_documents,
    position_windows,
    sliding_windows,
    truncated_windows,
)

LENGTHS = [150, 131, 97, 260, 129]
PROTOCOLS = ["fixed-targets", "sliding", "non-overlapping", "by-position"]


def plan_for(store, protocol, lengths=(16, 32, 64, 128), trained=16, bos="as-trained", stride=None):
    text = EvaluationText(store, bos, 1)
    settings = EvaluationSettings(
        protocol=protocol, lengths=list(lengths), targets=5, spans_per_document=3, stride=stride
    )
    return text, make_plan(settings, text, store.hash, "t", trained)


@pytest.mark.parametrize("bos", ["as-trained", "none", "every-window"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_scores_the_same_tokens(make_store, protocol, bos):
    store = make_store(LENGTHS)
    text, plan = plan_for(store, protocol, bos=bos)
    ids = plan.target_ids(text)
    assert len(ids) == plan.n_targets and not np.isin(ids, [1, 2]).any()
    for windows in [*plan.windows.values(), plan.truncated]:
        assert (windows.target_indices() == plan.truncated.target_indices()).all()
        assert (windows.target_documents() == plan.truncated.target_documents()).all()
        # What the scorer is shown last in each window are these ids.
        shown = measure(
            lambda w, keep: w[:, -keep:].astype(float), text, windows, batches(windows, 3)
        )
        assert (shown == ids).all()


@pytest.mark.parametrize("length, stride", [(16, 2), (16, 16), (13, 5), (100, 12)])
def test_sliding_counts_every_token_but_the_first_once_with_its_tail(make_store, length, stride):
    text = EvaluationText(make_store(LENGTHS))
    documents = long_documents(text, 100, 10, 0)
    assert documents.tolist() == [0, 1, 3, 4]
    windows = sliding_windows(text, documents, length, stride)
    for document in documents:
        here = windows.target_indices()[windows.target_documents() == document]
        assert (here == np.arange(1, text.lengths[document])).all()
    counted = windows.target_positions()
    first = np.concatenate([[True], np.diff(windows.document) != 0])
    late = np.repeat(~first, windows.keep)
    assert (counted[late] >= length - stride).all()


def test_non_overlapping_cuts_to_a_multiple_of_lmax(make_store):
    text = EvaluationText(make_store(LENGTHS))
    windows = block_windows(text, np.array([3]), 16, 64)  # 261 tokens: 260 targets, 4 times 64
    assert windows.n_targets == 256 and windows.target_indices()[-1] == 256
    with pytest.raises(EvaluationError, match="48 does not divide 64"):
        block_windows(text, np.array([3]), 48, 64)


def test_by_position_windows_and_their_truncation(make_store):
    text = EvaluationText(make_store(LENGTHS))
    whole = position_windows(text, np.array([0, 3]), 64, 5, seed=3)
    assert len(whole) == 10 and (whole.keep == 64).all()
    assert (whole.target_positions().reshape(10, 64) == np.arange(64)).all()
    cut = truncated_windows(whole, 16, 5)
    assert (cut.target_indices() == whole.target_indices()).all()
    seen = cut.target_positions() + 1
    offered = whole.target_positions() + 1
    early = offered <= 16
    assert (seen[early] == offered[early]).all()
    assert seen[~early].min() >= 16 - 5 + 1 and seen.max() == 16
    # Nothing before the window is shown.
    assert (cut.end - cut.inputs >= np.repeat(whole.end - 64, len(cut) // 10)).all()


def test_invalid_settings_are_rejected(make_store):
    store = make_store(LENGTHS)
    with pytest.raises(EvaluationError, match="stride=17"):
        plan_for(store, "sliding", stride=17)
    with pytest.raises(EvaluationError, match=r"0 of 5.*longest usable length is 260"):
        plan_for(store, "sliding", lengths=(16, 512))
    with pytest.raises(EvaluationError, match="targets=5 "):
        plan_for(store, "fixed-targets", lengths=[64], trained=4)
