"""Settings without what has no effect on short sequences: equal settings must mean equal logits."""

import pytest
import torch

from model import TokenPositions
from tests.files import table
from tests.model.zoo import build, ids

L0 = 16
LENGTHS = (6, 8, 9, 16, 17, 33)
METHODS = table("model/reduced.yaml")


def test_limits_of_different_windows_stay_apart():
    """Both windows and their sinks cover all tokens, but one limits distances to 13, one to 15."""
    remap = {"name": "lambda"}
    models = [
        build({"name": "rope", "window": window, "sinks": 4, "remap": remap}, train=L0)
        for window in (13, 15)
    ]
    near, far = (model.settings.position.reduced(L0, L0) for model in models)
    assert near != far
    assert (models[0](ids(1, L0)) - models[1](ids(1, L0))).abs().max() > 1e-6


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_equal_reduced_settings_mean_equal_logits(method):
    changes, unchanged_to = METHODS[method]
    trained = build({"name": "rope"}, train=L0)
    changed = build({"name": "rope", **changes}, train=L0)
    settings = changed.settings.position
    plain = trained.settings.position
    for length in LENGTHS:
        same = settings.reduced(length, L0) == plain.reduced(length, L0)
        assert same == (length <= unchanged_to)
        tokens = ids(1, length)
        positions = TokenPositions.plain(length)
        difference = (changed(tokens, positions) - trained(tokens, positions)).abs().max()
        assert difference < 1e-10 or not same
    assert not same
    assert difference > 1e-6  # at the longest length


@pytest.mark.parametrize("scaling", ["truncated", "clipped", "llama3"])
@torch.no_grad()
def test_frequencies_of_the_scheme_decide_what_a_scaling_changes(scaling):
    """With base 2, all pairs of RoPE complete turns within 64 tokens, and none of HeXu's does."""
    keys = {"name": "he_xu", "theta": 2.0}
    methods = {"truncated": {}, "clipped": {}, "llama3": {"factor": 4.0, "high_freq_factor": 3.0}}
    changed = {"name": scaling, **methods[scaling]}
    trained, other = (build(each, train=64) for each in (keys, {**keys, "scaling": changed}))
    assert (other(ids(1, 40)) - trained(ids(1, 40))).abs().max() > 1e-6
    assert scaling in other.settings.position.reduced(40, 64).describe(40, 64)
    rope = build({"name": "rope", "theta": 2.0, "scaling": changed}, train=64).settings.position
    assert rope.reduced(40, 64).describe(40, 64) == "rope, theta 2"
