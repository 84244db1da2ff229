import numpy as np
import pytest
import torch

from evaluation.scoring.scoring import CellFailed, ModelScorer, batches, measure
from evaluation.scoring.targets import draw_targets
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import fixed_windows, sliding_windows
from model import TokenPositions


@pytest.fixture
def work(make_store):
    text = EvaluationText(make_store([120, 133, 90, 101]))
    targets = draw_targets(
        text, corpus_hash="c", tokenizer_hash="t", longest=64, span=7, spans_per_document=3
    )
    return text, targets


def naive(model, text, windows):
    """One window at a time, all logits, log-softmax, no keep, no cache."""
    out = []
    for document, end, inputs, keep in zip(
        windows.document, windows.end, windows.inputs, windows.keep, strict=True
    ):
        tokens = torch.from_numpy(text.slice(document, end - inputs - 1, end))
        with torch.no_grad():
            logits = model(
                tokens[None, :-1], TokenPositions.plain(int(inputs), length=int(inputs))
            )[0]
        nll = -torch.log_softmax(logits.double(), -1)[torch.arange(int(inputs)), tokens[1:]]
        out.append(nll[-keep:].numpy())
    return np.concatenate(out)


def test_batches_and_chunks_only_change_rounding(work, sharp):
    text, targets = work
    model = sharp({"name": "rope", "window": 11}).double()
    windows = fixed_windows(targets, 64)
    want = naive(model, text, windows)
    assert want.std() > 0.5  # a model that says something
    for batch, chunk in ((1, 63), (4, 64), (4, 20), (100, 59), (100, 5)):
        got = measure(ModelScorer(model, chunk=chunk), text, windows, batches(windows, batch))
        assert np.abs(got - want).max() <= 1e-9


def test_the_declared_length_sets_the_factor(work, sharp):
    text, targets = work
    model = sharp({"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}}).double()
    windows = fixed_windows(targets, 32)
    plain = measure(ModelScorer(model), text, windows, batches(windows, 1))
    same = measure(ModelScorer(model, length=32), text, windows, batches(windows, 1))
    measured = measure(ModelScorer(model, length=64), text, windows, batches(windows, 1))
    assert (plain == same).all() and np.abs(measured - plain).max() > 1e-3


def test_batches_hold_one_shape_and_every_window_once(work):
    text, _ = work
    windows = sliding_windows(text, np.array([0, 1, 3]), 40, 9)
    found = batches(windows, 4)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(windows)))
    for members in found:
        assert len(members) <= 4
        assert len(set(zip(windows.inputs[members], windows.keep[members], strict=True))) == 1


def test_a_non_finite_target_fails_the_cell_and_is_never_dropped(work):
    text, targets = work
    windows = fixed_windows(targets, 32)

    def broken(tokens, keep):
        out = np.ones((len(tokens), keep))
        out[-1, 2] = np.nan if len(tokens) == 5 else np.inf
        return out

    for batch in (5, 4):
        with pytest.raises(CellFailed, match=r"length 32, document doc\d"):
            measure(broken, text, windows, batches(windows, batch))


def test_interrupted_measurement_resumes(work, sharp):
    text, targets = work
    scorer = ModelScorer(sharp())
    windows = fixed_windows(targets, 32)
    want = measure(scorer, text, windows, batches(windows, 2))
    out = np.full(windows.n_targets, np.nan)
    calls = []

    def stop(inputs):
        calls.append(inputs)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(scorer, text, windows, batches(windows, 2), out=out, after=stop)
    assert 0 < np.isnan(out).sum() < len(out)
    asked = []

    def counted(tokens, keep):
        asked.append(len(tokens))
        return scorer(tokens, keep)

    assert (measure(counted, text, windows, batches(windows, 2), out=out) == want).all()
    assert sum(asked) == len(windows) - 6


def test_scoring_restores_training_mode_and_gradients(work, sharp):
    text, targets = work
    model = sharp().train()
    measure(
        ModelScorer(model), text, fixed_windows(targets, 64), batches(fixed_windows(targets, 64), 1)
    )
    assert model.training
    # Tables that grew during the evaluation serve a training step afterwards.
    tokens = torch.randint(3, 23, (2, 65))
    model(tokens[:, :-1], TokenPositions.plain(64), targets=tokens[:, 1:]).mean().backward()
    assert all(p.grad is not None for p in model.parameters())
