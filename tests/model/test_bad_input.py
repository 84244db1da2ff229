"""Every invalid setting or input raises one error that names it and the fix."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from model import ModelSettings, TokenPositions, check_override
from tests.model.zoo import build, ids, refusal, settings_of

UNKNOWN = {"position": {"name": "roep"}}


@pytest.mark.parametrize("settings", [UNKNOWN, {"pattern": ["a"], "kinds": {"a": UNKNOWN}}])
def test_unknown_scheme_lists_available(settings):
    text = refusal(lambda: ModelSettings(**settings), ValidationError)
    assert "'alibi'" in text and "'rope'" in text and "roep" in text


@pytest.mark.parametrize(
    ("layers", "kinds", "word"),
    [
        (["near", "fra"], ["near", "far"], "'fra'"),
        (["near"], ["near", "far"], "'far'"),
        ([], ["near"], "pattern"),
    ],
)
def test_pattern_must_match_layer_types(layers, kinds, word):
    kinds = {kind: {"position": {"name": "none"}} for kind in kinds}
    settings = {"pattern": layers, "kinds": kinds}
    assert word in refusal(lambda: ModelSettings(**settings), ValidationError)


def test_length_beyond_learned_table_reports_offset_plus_length():
    model = build("learned")  # eleven rows
    with torch.no_grad():
        model(ids(1, 11))
        for positions in (
            TokenPositions.plain(12),
            TokenPositions.plain(3, offset=9),
            TokenPositions.left_padded([12], 12),
        ):
            text = refusal(lambda p=positions: model(ids(1, p.order.shape[1]), p))
            assert "'learned'" in text and "offset + T = 12" in text and "11 tokens" in text


ROPE = {"name": "rope", "theta": 500.0, "window": 8}


def test_pattern_overrides_follow_layer_types():
    def pattern(layers=("a", "b"), **near):
        kinds = {"a": {**ROPE, **near}, "b": {"name": "none"}}
        return settings_of({"name": "pattern", "layers": list(layers), "kinds": kinds})

    check_override(pattern(), pattern(window=3))
    text = refusal(lambda: check_override(pattern(), pattern(fraction=0.5)))
    assert "model.kinds.a.position.fraction" in text
    text = refusal(lambda: check_override(pattern(), pattern(("b", "a"))))
    assert "model.pattern" in text
    text = refusal(lambda: check_override(pattern(), settings_of(ROPE)))
    assert "pattern" in text
