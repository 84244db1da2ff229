import numpy as np
import pytest
import torch
import torch.nn.functional as F

from errors import EvaluationError
from evaluation.monitor import text_targets
from evaluation.scoring.windows import fixed_windows
from model import TokenPositions


def test_losses_match_naive_loop_and_are_deterministic(make_store, sharp):
    store = make_store([90, 150, 130, 77, 20, 88, 140, 160, 99, 101], seed=6)
    monitor = text_targets(
        store,
        [16, 32, 64],
        targets=6,
        spans=7,
        seed=3,
    )
    assert monitor.lengths == [16, 32, 64]
    assert monitor.note == ""
    # the declared length matters
    model = sharp({"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}}).train()
    first = monitor.measure(model)
    assert monitor.measure(model) == first
    assert model.training
    for length, (nll, count) in first.items():
        assert count == 7 * 6
        total = 0.0
        text, targets = monitor.share.args
        windows = fixed_windows(targets, length)
        document, end, *_ = windows.T
        tokens = torch.from_numpy(text.windows(document, end, length))
        for row in tokens:
            with torch.no_grad():
                (logits,) = model(row[None, :-1], TokenPositions.plain(length)).double()
            losses = F.cross_entropy(logits, row[1:], reduction="none")
            total += losses[-6:].sum().item()
        assert nll == pytest.approx(total / count, abs=1e-5)


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
