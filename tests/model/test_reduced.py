"""Settings without what has no effect on short sequences: equal settings must mean equal logits."""

from __future__ import annotations

import pytest
import torch

from model import TokenPositions
from tests.model.zoo import build, ids

L0 = 16
LENGTHS = (6, 8, 9, 16, 17, 33)
KEPT = {"window": 12, "sinks": 4}
AUTO = {"factor": "auto"}
# Overrides of a model trained with RoPE at 16 tokens, and the longest length that they are known to
# keep.
METHODS = {
    "linear": ({"scaling": {"name": "linear", **AUTO}}, L0),
    "ntk": ({"scaling": {"name": "ntk", **AUTO}}, L0),
    "yarn": ({"scaling": {"name": "yarn", **AUTO}}, L0),
    "longrope": ({"scaling": {"name": "longrope", "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0]}}, L0),
    "dynamic": ({"scaling": {"name": "dynamic", "factor": 2.0}}, L0),
    "fixed factor": ({"scaling": {"name": "linear", "factor": 2.0}}, 0),
    "window": ({"window": 9}, 9),
    "window and sinks": (KEPT, 16),
    "rerope": ({"remap": {"name": "rerope"}}, 8),
    "leaky_rerope": ({"remap": {"name": "leaky_rerope"}}, 8),
    "self_extend": ({"remap": {"name": "self_extend"}}, 8),
    "lambda": ({**KEPT, "remap": {"name": "lambda"}}, 9),
    "streaming": ({**KEPT, "remap": {"name": "streaming"}}, 16),
    "temperature": ({"temperature": {"name": "fixed", "value": 1.5}}, 0),
}


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
    assert not same and difference > 1e-6  # at the longest length
