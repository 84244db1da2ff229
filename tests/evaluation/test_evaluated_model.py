"""A model that `EvaluatedModel.under` returned stays as it is until the next one is asked for."""

import pytest
import torch

from evaluation.scoring import cells
from model import TokenPositions

METHODS = {
    "trained": [],
    "yarn": ["model.position.scaling={name: yarn, factor: 4}"],
    "linear": ["model.position.scaling={name: linear, factor: 3}"],
    "window": ["model.position.window=7"],
}


@torch.no_grad()
def logits(model):
    tokens = torch.arange(40)[None] % 7
    return model(tokens, TokenPositions.plain(40)).clone()


@pytest.mark.parametrize("order", [[*METHODS], [*reversed(METHODS)]], ids=" ".join)
def test_asking_for_a_limit_changes_no_returned_model(subject, order):
    for label in order:
        model = subject.under(METHODS[label])
        before = logits(model)
        for other in order:
            subject.longest(METHODS[other])
            assert torch.equal(logits(model), before), (label, other)


def test_limits_are_those_of_the_models(subject, sharp):
    for overrides in METHODS.values():
        assert subject.longest(overrides) == subject.under(overrides).limit is None
    learned = type(subject)(sharp({"name": "learned", "max_length": 48}))
    assert learned.longest(()) == learned.under(()).limit == 48


def test_memory_is_measured_after_the_cast_copy(do, subject, monkeypatch):
    found = []

    def measure(device):
        found.append(subject._cast is not None)
        return 2**30

    monkeypatch.setattr(cells, "free_memory", measure)
    do(dtype="bfloat16", methods=("trained", "yarn"), lengths=[16])
    assert found == [True]


def test_one_hook_for_each_layer(subject):
    model = subject.under(())
    with pytest.raises(ValueError, match="1 hooks for"):
        model(torch.zeros(1, 3, dtype=torch.long), hooks=[None])
