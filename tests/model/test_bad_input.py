"""Every invalid setting or input raises one error that names it and the fix."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from model import ModelError, ModelSettings, TokenPositions, Transformer, check_override
from tests.model.zoo import V, build, ids, settings_of


def message_of(error, call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def made(**keys) -> Transformer:
    return Transformer(ModelSettings(**keys), V, 16)


def test_model_error_is_a_value_error():
    assert issubclass(ModelError, ValueError)


@pytest.mark.parametrize("keys", [{"dim": 45, "heads": 3}, {"dim": 28, "heads": 4, "head_dim": 9}])
def test_odd_head_dim(keys):
    text = message_of(ModelError, lambda: made(**keys, position={"name": "rope"}))
    odd = keys.get("head_dim", 15)
    assert "even head dimension" in text and f"got {odd}" in text and "model.head_dim" in text
    made(**keys, position={"name": "alibi"})  # no scheme but rotations minds


def test_heads_not_divisible_by_kv_heads():
    text = message_of(ValidationError, lambda: ModelSettings(dim=48, heads=6, kv_heads=4))
    assert "heads 6" in text and "kv_heads 4" in text


def test_width_not_divisible_by_heads():
    text = message_of(ValidationError, lambda: ModelSettings(dim=50, heads=6))
    assert "dim 50" in text and "heads 6" in text and "head_dim" in text


@pytest.mark.parametrize(
    "position",
    [{"name": "roep"}, {"name": "pattern", "layers": ["a"], "kinds": {"a": {"name": "x"}}}],
)
def test_unknown_scheme_lists_available(position):
    text = message_of(ValidationError, lambda: ModelSettings(position=position))
    assert "'alibi'" in text and "'rope'" in text and position["name"][:1] in text


@pytest.mark.parametrize(
    "position",
    [
        {"name": "rope", "tehta": 3.0},
        {"name": "alibi", "theta": 3.0},
        {"name": "rope", "scaling": {"name": "linear", "beta_fast": 3.0}},
        {"name": "rope", "scaling": {"name": "dinamic"}},
        {"name": "rope", "scaling": {"name": "linear", "factor": 0.5}},
        {"name": "rope", "scaling": {"name": "yarn", "factor": "automatic"}},
        {"name": "rope", "fraction": 0.0},
        {"name": "rope", "fraction": 1.1},
        {"name": "rope", "theta": 1.0},
        {"name": "none", "window": 0},
        {"name": "learned", "max_length": 0},
    ],
)
def test_unknown_keys_and_values_out_of_range_are_rejected(position):
    with pytest.raises(ValidationError):
        ModelSettings(position=position)


def test_settings_are_frozen():
    settings = ModelSettings()
    with pytest.raises(ValidationError):
        settings.dim = 3
    with pytest.raises(ValidationError):
        settings.position.theta = 3.0


def test_scaling_limits_must_be_ordered():
    def scaled(**keys):
        return lambda: ModelSettings(position={"name": "rope", "scaling": keys})

    text = message_of(ValidationError, scaled(name="yarn", beta_fast=1.0, beta_slow=2.0))
    assert "beta_fast 1.0 must exceed beta_slow 2.0" in text
    text = message_of(
        ValidationError, scaled(name="llama3", low_freq_factor=4.0, high_freq_factor=4.0)
    )
    assert "high_freq_factor 4.0 must exceed low_freq_factor 4.0" in text


def test_rotation_requires_enough_pairs():
    text = message_of(
        ModelError, lambda: made(dim=40, heads=4, position={"name": "rope", "fraction": 0.1})
    )
    assert "fraction 0.1" in text and "no pair" in text
    ntk = {"name": "rope", "fraction": 0.2, "scaling": {"name": "ntk", "factor": 2.0}}
    text = message_of(ModelError, lambda: made(dim=40, heads=4, position=ntk))
    assert "at least 4 rotated dimensions" in text and "got 2" in text


def test_pattern_must_match_layer_types():
    def pattern(layers, kinds):
        scheme = {
            "name": "pattern",
            "layers": layers,
            "kinds": {k: {"name": "none"} for k in kinds},
        }
        return lambda: ModelSettings(position=scheme)

    text = message_of(ValidationError, pattern(["near", "fra"], ["near", "far"]))
    assert "'fra'" in text and "near, far" in text
    assert "'far' is used by no layer" in message_of(
        ValidationError, pattern(["near"], ["near", "far"])
    )
    with pytest.raises(ValidationError):
        pattern([], [])()


def test_length_beyond_learned_table_reports_offset_plus_length():
    model = build("learned")  # eleven rows
    with torch.no_grad():
        model(ids(1, 11), TokenPositions.plain(11))
        for positions in (
            TokenPositions.plain(12),
            TokenPositions.plain(3, offset=9),
            TokenPositions.left_padded([12], 12),
        ):
            text = message_of(ModelError, lambda p=positions: model(ids(1, p.order.shape[1]), p))
            assert "'learned'" in text and "offset + T = 12" in text and "11 tokens" in text


def test_failed_forward_leaves_cache_unchanged():
    model = build("learned")
    tokens = ids(1, 11)
    with torch.no_grad():
        whole = model(tokens, TokenPositions.plain(11))
        cache = model.make_cache(1, 20)
        model(tokens[:, :8], TokenPositions.plain(8), cache=cache)
        with pytest.raises(ModelError):
            model(tokens[:, :4], TokenPositions.plain(4, offset=8), cache=cache)
        assert cache.filled == 8
        torch.testing.assert_close(
            model(tokens[:, 8:], TokenPositions.plain(3, offset=8), cache=cache), whole[:, 8:]
        )


def test_full_cache():
    model = build("rope")
    cache = build("rope").make_cache(1, 6)
    with torch.no_grad():
        model(ids(1, 4), TokenPositions.plain(4), cache=cache)
        text = message_of(
            ModelError, lambda: model(ids(1, 3), TokenPositions.plain(3, offset=4), cache=cache)
        )
        assert "6 tokens" in text and "got 7" in text
        model(ids(1, 2), TokenPositions.plain(2, offset=4), cache=cache)  # what fits still goes in
        assert cache.filled == 6


def test_cache_rejects_gradients_and_other_layouts():
    model = build("rope")
    cache = build("rope").make_cache(1, 9)
    assert "no_grad" in message_of(
        ModelError, lambda: model(ids(1, 4), TokenPositions.plain(4), cache=cache)
    )
    with torch.no_grad():
        model(ids(1, 4), TokenPositions.plain(4), cache=cache)
        ragged = TokenPositions.left_padded([4], 1, offset=4)
        text = message_of(ModelError, lambda: model(ids(1, 1), ragged, cache=cache))
        assert "plain" in text and "ragged" in text


def test_left_padding_exceeding_cache_capacity():
    text = message_of(ModelError, lambda: TokenPositions.left_padded([5, 3], 4))
    assert "5 slots" in text and "got 4" in text


ROPE = {"name": "rope", "theta": 500.0, "window": 8}
LEGAL = [
    (ROPE, {**ROPE, "window": None}),
    (ROPE, {**ROPE, "theta": 9e5}),
    (ROPE, {**ROPE, "scaling": {"name": "yarn", "factor": "auto"}}),
    ({"name": "sinusoidal"}, {"name": "sinusoidal", "theta": 77.0, "window": 4}),
    ({"name": "alibi"}, {"name": "alibi", "window": 4}),
    ({"name": "none"}, {"name": "none", "window": 4}),
    ({"name": "learned"}, {"name": "learned", "window": 4}),
]
ILLEGAL = [
    (ROPE, {**ROPE, "layout": "interleaved"}, "model.position.layout", "scaling, theta, window"),
    (ROPE, {**ROPE, "fraction": 0.5}, "model.position.fraction", "scaling, theta, window"),
    (ROPE, {"name": "alibi"}, "model.position.name", "cannot become 'alibi'"),
    (
        {"name": "sinusoidal"},
        {"name": "sinusoidal", "layout": "half"},
        "model.position.layout",
        "theta, window",
    ),
    (
        {"name": "learned"},
        {"name": "learned", "max_length": 99},
        "model.position.max_length",
        "window",
    ),
]


@pytest.mark.parametrize(("trained", "asked"), LEGAL)
def test_valid_overrides(trained, asked):
    check_override(settings_of(trained), settings_of(asked))
    check_override(settings_of(asked), settings_of(asked))


@pytest.mark.parametrize(("trained", "asked", "key", "message"), ILLEGAL)
def test_invalid_overrides_list_valid_ones(trained, asked, key, message):
    text = message_of(ModelError, lambda: check_override(settings_of(trained), settings_of(asked)))
    assert key in text and all(word in text for word in message.split(", "))


def test_shapes_cannot_be_overridden():
    for key, value in {
        "dim": 30,
        "tie_embeddings": True,
        "qk_norm": True,
        "norm_eps": 1e-6,
        "logit_softcap": 9.0,
    }.items():
        text = message_of(
            ModelError,
            lambda k=key, v=value: check_override(settings_of(ROPE), settings_of(ROPE, **{k: v})),
        )
        assert f"model.{key}" in text


def test_pattern_overrides_follow_layer_types():
    def pattern(layers=("a", "b"), **near):
        kinds = {"a": {**ROPE, **near}, "b": {"name": "none"}}
        return settings_of({"name": "pattern", "layers": list(layers), "kinds": kinds})

    check_override(pattern(), pattern(window=3))
    text = message_of(ModelError, lambda: check_override(pattern(), pattern(fraction=0.5)))
    assert "model.position.kinds.a.fraction" in text
    text = message_of(ModelError, lambda: check_override(pattern(), pattern(("b", "a"))))
    assert "pattern of layers" in text
    text = message_of(ModelError, lambda: check_override(pattern(), settings_of(ROPE)))
    assert "pattern" in text
