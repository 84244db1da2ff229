import numpy as np
import pytest
import torch

from evaluation import EvaluationError, monitor_targets
from evaluation.protocols import fixed_windows
from model import Places


def test_the_numbers_are_the_naive_ones_and_repeat_bit_for_bit(make_store, sharp):
    store = make_store([90, 150, 130, 77, 20, 88, 140, 160, 99, 101], seed=6)
    monitor = monitor_targets(store, [16, 32, 64], targets=6, spans=7, seed=3)
    assert monitor.lengths == [16, 32, 64] and monitor.note == ""
    model = sharp().train()
    first, second = monitor.measure(model), monitor.measure(model)
    assert first == second and model.training
    again = monitor_targets(
        make_store([90, 150, 130, 77, 20, 88, 140, 160, 99, 101], seed=6), [16, 32, 64], 6, 7, 3
    )
    assert again.measure(model) == first
    for length, (nll, count) in first.items():
        assert count == 7 * 6
        total = 0.0
        windows = fixed_windows(monitor.targets, length)
        tokens = torch.from_numpy(monitor.text.windows(windows.document, windows.end, length))
        with torch.no_grad():
            for row in tokens:
                logits = model(row[None, :-1], Places.plain(length, length=length))[0].double()
                total -= torch.log_softmax(logits, -1)[torch.arange(length), row[1:]][-6:].sum().item()
        assert nll == pytest.approx(total / count, abs=1e-5)


def test_it_has_its_own_documents_and_never_bos_or_eos(make_store):
    monitor = monitor_targets(make_store([90] * 12), [16, 64], targets=6, spans=8, seed=3)
    assert len(np.unique(monitor.targets.document)) == 8
    windows = monitor.text.windows(monitor.targets.document, monitor.targets.end, 16)
    assert not np.isin(windows[:, -6:], [1, 2]).any()


def test_lengths_that_few_documents_reach_are_left_out_and_said(make_store):
    monitor = monitor_targets(make_store([90] * 7 + [300] * 3), [16, 64, 128], targets=6, spans=10)
    assert monitor.lengths == [16, 64] and "only 3 of 10" in monitor.note
    few = monitor_targets(make_store([300, 40]), [16, 32, 128], targets=6, spans=10)
    assert few.lengths == [16, 32]
    with pytest.raises(EvaluationError, match="longest usable length is 30"):
        monitor_targets(make_store([30, 21]), [64, 128], targets=6)


def test_a_span_is_never_longer_than_the_shortest_length(make_store):
    monitor = monitor_targets(make_store([90] * 9), [4, 8], targets=64, spans=9)
    assert monitor.targets.span == 4
