"""Calls that a cache rejects because its keys would silently be wrong."""

from dataclasses import replace

import pytest
import torch

from model import ModelError, TokenPositions
from tests.model.zoo import T, build, ids

YARN = {"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}}


@torch.no_grad()
def test_a_factor_that_follows_the_length_needs_one_declared_length():
    model = build(YARN)
    tokens = ids(2, T)
    cache = model.make_cache(2, T)
    model(tokens[:, : T - 1], TokenPositions.plain(T - 1), cache=cache)
    with pytest.raises(ModelError, match=rf"declared length .*{T - 1}.* to .*{T}"):
        model(tokens[:, T - 1 :], TokenPositions.plain(1, offset=T - 1), cache=cache)
    assert cache.filled == T - 1


@torch.no_grad()
def test_rows_and_layout_stay_what_they_were():
    model = build("rope")
    tokens = ids(2, T)
    cache = model.make_cache(2, 2 * T)
    model(tokens, TokenPositions.plain(T), cache=cache)
    with pytest.raises(ModelError, match=r"plain layout .*ragged layout"):
        model(tokens, TokenPositions.left_padded([T, T], T, offset=T), cache=cache)
    ragged = model.make_cache(2, 2 * T)
    model(tokens, TokenPositions.left_padded([T, 3], T), cache=ragged)
    with pytest.raises(ModelError, match=r"2 rows .* 1"):
        model(tokens[:1], TokenPositions.left_padded([T], T, offset=T), cache=ragged)


@pytest.mark.parametrize(
    "case", ["rope", "rope-rerope", "rope-dual-chunk", "pope", "alibi", "xpos"]
)
@torch.no_grad()
def test_a_full_cache_has_the_declared_key_features(case):
    model = build(case)
    tokens = ids(1, 5)
    cache = model.make_cache(1, 5)
    model(tokens, TokenPositions.plain(5), cache=cache)
    held = sum(
        x[0].numel()
        for layer_cache in cache.layers
        for x in (layer_cache._buffers["k"], layer_cache._buffers["v"])
    )
    assert held == model.cached_numbers(5)


GROWING = ["rope", "rope-window", "none-sinks", "fox", "pattern-alibi"]


@pytest.mark.parametrize("case", GROWING)
@pytest.mark.parametrize("layout", ["plain", "ragged"])
@torch.no_grad()
def test_a_cache_grows_while_it_is_used(case, layout):
    model = build(case)
    tokens = ids(2, T)
    counts = [T, T - 3]
    whole = TokenPositions.plain(T) if layout == "plain" else TokenPositions.left_padded(counts, T)
    expected = model(tokens, whole)
    cache = model.make_cache(2, 4)
    parts = []
    for start, stop in ((0, 4), (4, 7), (7, 8), (8, T)):
        if stop > cache.capacity:
            cache.grow(stop)
        parts.append(
            model(tokens[:, start:stop], whole.part(start, stop, position_end=stop), cache=cache)
        )
    found = torch.cat(parts, 1)
    for row, count in enumerate([T, T] if layout == "plain" else counts):
        torch.testing.assert_close(found[row, -count:], expected[row, -count:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", [*GROWING, "linear", "rope-ntk-auto", "sinusoidal-auto"])
@pytest.mark.parametrize("layout", ["plain", "ragged"])
@torch.no_grad()
def test_selected_rows_of_a_cache(case, layout):
    """Rows are repeated and reordered, as in beam search, and continue as if they had always been
    there, each with its declared length."""
    options = {"mixer": {"name": "linear", "chunk": 4}} if case == "linear" else {}
    model = build("rope" if case == "linear" else case, **options)
    tokens = ids(3, T)
    counts = [T, T - 3, T - 1]
    lengths = [T, 5 * T, 2 * T]
    rows = torch.tensor([2, 0, 2, 1])

    def positions(rows: list[int]) -> TokenPositions:
        declared = [lengths[row] for row in rows]
        if layout == "plain":
            return replace(TokenPositions.plain(T), lengths=tuple(declared))
        return TokenPositions.left_padded([counts[row] for row in rows], T, lengths=declared)

    before = positions([0, 1, 2])
    half = T - 5
    cache = model.make_cache(3, T)
    model(tokens[:, :half], before.part(0, half, position_end=half), cache=cache)
    cache.select_rows(rows)
    after = positions(rows.tolist()).part(half, T, position_end=T)
    decoded = model(tokens[rows, half:], after, cache=cache)
    expected = model(tokens, before)[rows, half:]
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-10)
