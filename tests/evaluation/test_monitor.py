import numpy as np
import pytest

from errors import EvaluationError
from evaluation.fixed_target_loss import score
from evaluation.monitor import text_targets
from model import TokenPositions


def test_losses_are_those_of_fixed_targets(make_store, sharp):
    store = make_store([90, 150, 130, 77, 20, 88, 140, 160, 99, 101], seed=6)
    lengths = [16, 32, 64]
    monitor = text_targets(store, lengths, targets=6, spans=7, seed=3)
    assert (monitor.lengths, monitor.note) == (lengths, "")
    # the declared length matters
    model = sharp({"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}}).train()
    first = monitor.measure(model)
    assert monitor.measure(model) == first
    assert model.training
    text, targets = monitor.share.args
    ends = list(zip(targets.document.tolist(), targets.end.tolist(), strict=True))
    documents = [text.slice(d, 0, text.lengths[d]) for d in range(store.n_documents)]
    for length, (nll, count) in first.items():
        places = TokenPositions.plain(length)
        losses = score(lambda ids, at=places: model(ids, at), documents, [length], 6, ends)
        assert count == len(losses) == 7 * 6
        assert nll == pytest.approx(losses.nll.mean(), abs=1e-5)


def test_ranks_match_single_process_with_equal_batches(make_store, sharp, monkeypatch):
    monitor = text_targets(make_store([90, 300, 150, 130] * 4), [16, 128, 80], targets=6, spans=9)
    model = sharp()
    passes = []
    monkeypatch.setattr("evaluation.monitor.rows_of", lambda length: 2)
    alone = monitor.measure(model)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: passes.append(1) or forward(*a, **k))
    for world in (2, 3, 4, 7):
        held = []
        counts = []

        def leave(mine, held=held):  # where a rank would wait for the others
            held.append(mine)
            raise InterruptedError

        for rank in range(world):
            passes.clear()
            with pytest.raises(InterruptedError):
                monitor.measure(model, "cpu", rank, world, leave)
            counts.append(len(passes))
        assert len(set(counts)) == 1
        assert counts[0] == len(monitor.lengths) * -(-5 // world)
        owned = [np.isfinite(mine[16]).sum() for mine in held]
        assert sum(owned) == 9 * 6 > max(owned)
        assert monitor.measure(model, "cpu", 0, world, lambda mine, held=held: held) == alone


def test_failing_length_is_nan_and_others_are_kept(make_store, sharp):
    monitor = text_targets(make_store([90] * 9), [16, 32, 64], targets=6, spans=9)
    model = sharp()
    forward = model.forward

    def breaks(tokens, *args, **kwargs):
        return forward(tokens, *args, **kwargs) * (float("inf") if tokens.shape[1] == 32 else 1.0)

    fine = monitor.measure(model)
    model.forward = breaks
    found = monitor.measure(model)
    assert np.isnan(found[32][0])
    assert found[32][1] == 54
    assert found[16] == fine[16]
    assert found[64] == fine[64]


def test_lengths_with_few_documents_are_skipped_with_warning(make_store):
    monitor = text_targets(make_store([90] * 7 + [300] * 3), [16, 64, 128], targets=6, spans=10)
    assert monitor.lengths == [16, 64]
    assert "only 3 of 10" in monitor.note
    few = text_targets(make_store([300, 40]), [16, 32, 128], targets=6, spans=10)
    assert few.lengths == [16, 32]
    with pytest.raises(EvaluationError, match="longest usable length is 30"):
        text_targets(make_store([30, 21]), [64, 128], targets=6)
