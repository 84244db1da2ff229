"""Calls that a cache rejects because its keys would silently be wrong."""

import pytest
import torch

from model import Cache, ModelError, TokenPositions
from model.cache import CacheIndex
from tests.model.zoo import T, build, ids

YARN = {"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}}


@torch.no_grad()
def test_a_factor_that_follows_the_length_needs_one_declared_length():
    model, tokens = build(YARN), ids(2, T)
    cache = Cache(model, 2, T)
    model(tokens[:, : T - 1], TokenPositions.plain(T - 1), cache=cache)
    with pytest.raises(ModelError, match=rf"declared length .*{T - 1}.* to .*{T}"):
        model(tokens[:, T - 1 :], TokenPositions.plain(1, offset=T - 1), cache=cache)
    assert cache.filled == T - 1


@torch.no_grad()
def test_a_fixed_factor_goes_on_without_a_declared_length():
    model, tokens = build({"name": "rope", "scaling": {"name": "yarn", "factor": 3.0}}), ids(2, T)
    cache = Cache(model, 2, T)
    parts = [
        model(tokens[:, : T - 1], TokenPositions.plain(T - 1), cache=cache),
        model(tokens[:, T - 1 :], TokenPositions.plain(1, offset=T - 1), cache=cache),
    ]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens, TokenPositions.plain(T)))


def test_the_first_positions_are_not_remapped():
    new = TokenPositions.plain(4, offset=3)
    assert CacheIndex(8, None, 0).advance(new) is new


@torch.no_grad()
def test_rows_and_layout_stay_what_they_were():
    model, tokens = build("rope"), ids(2, T)
    cache = Cache(model, 2, 2 * T)
    model(tokens, TokenPositions.plain(T), cache=cache)
    with pytest.raises(ModelError, match=r"plain layout .*ragged layout"):
        model(tokens, TokenPositions.left_padded([T, T], T, offset=T), cache=cache)
    ragged = Cache(model, 2, 2 * T)
    model(tokens, TokenPositions.left_padded([T, 3], T), cache=ragged)
    with pytest.raises(ModelError, match=r"2 rows .* 1"):
        model(tokens[:1], TokenPositions.left_padded([T], T, offset=T), cache=ragged)


@pytest.mark.parametrize("case", ["rope", "rope-rerope", "rope-dual-chunk", "pope", "alibi", "xpos"])
@torch.no_grad()
def test_a_full_cache_has_the_declared_key_features(case):
    model, tokens = build(case), ids(1, 5)
    cache = Cache(model, 1, 5)
    model(tokens, TokenPositions.plain(5), cache=cache)
    held = sum(
        x[0].numel() // 5
        for layer_cache in cache.layers
        for x in (layer_cache._buffers["k"], layer_cache._buffers["v"])
    )
    assert held == model.cached_per_token
