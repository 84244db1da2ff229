"""Linear attention with caches, padding, packing and skipped positions equals one full pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import ModelError, TokenPositions
from tests.model.linear import every_form, every_scheme, linear
from tests.model.zoo import TRAIN, D, G, T, V, cached, close, ids, packed, reach_of


@every_form
@every_scheme
@settings(max_examples=2)
@given(data=st.data())
def test_chunked_cache_matches_full_forward(scheme, form, data):
    chunk = data.draw(st.sampled_from([1, 2, 5, 64]), label="chunk")
    whole_model = linear(scheme, form, 64, qk_norm=True)
    model = linear(scheme, form, chunk, qk_norm=True)
    length = reach_of(model)
    tokens = ids(2, length)
    cuts = data.draw(
        st.lists(st.integers(1, length - 1), unique=True, max_size=6).map(sorted), label="cuts"
    )
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, length])]
    with torch.no_grad():
        whole = whole_model(tokens, TokenPositions.plain(length))
    close(cached(model, tokens, sizes), whole)


@every_form
@every_scheme
@torch.no_grad()
def test_future_is_masked(scheme, form):
    model = linear(scheme, form)
    length = reach_of(model)
    tokens = ids(2, length)
    whole = model(tokens, TokenPositions.plain(length))
    for t in (0, 3, length - 2):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        moved = (model(changed, TokenPositions.plain(length)) - whole).abs().amax(-1)
        assert (moved[:, :t] == 0).all() and (moved[:, t:] > 1e-7).all()


def part(positions: TokenPositions, start: int, stop: int) -> TokenPositions:
    """Some of the tokens, in the same declared lengths."""
    return positions.part(start, stop)


@every_form
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("prefill", [[16], [3, 13], [1] * 16])
@torch.no_grad()
def test_left_padded_row_matches_unpadded_row(form, chunk, prefill):
    model = linear("auto", form, chunk)
    width = 16
    counts = [width, 2, width - 5, 3]
    tokens = ids(4, width + 3)
    alone = [
        model(tokens[r : r + 1, width - n :], TokenPositions.plain(n + 3))[0]
        for r, n in enumerate(counts)
    ]
    positions = TokenPositions.left_padded(counts, width + 3)
    cache = model.make_cache(4, width + 3)
    parts = []
    start = 0
    for size in [*prefill, 1, 1, 1]:
        piece = part(positions, start, start + size)
        parts.append(model(tokens[:, start : start + size], piece, cache=cache))
        start += size
    out = torch.cat(parts, 1)
    assert torch.isfinite(out).all()
    whole = model(tokens, positions)
    for r, count in enumerate(counts):
        close(whole[r, width - count :], alone[r])
        close(out[r, width - count :], alone[r])
    close(model(tokens, positions, keep=4), whole[:, -4:])


@every_form
@torch.no_grad()
def test_padding_tokens_are_masked(form):
    model = linear("rope", form)
    width = T
    positions = TokenPositions.left_padded([width, 4], width)
    tokens = ids(2, width)
    changed = tokens.clone()
    changed[1, : width - 4] = (changed[1, : width - 4] + 5) % V
    close(model(changed, positions)[1, -4:], model(tokens, positions)[1, -4:], atol=0)


@every_form
@settings(max_examples=4)
@given(data=st.data())
def test_packed_documents_equal_separate_documents(form, data):
    chunk = data.draw(st.sampled_from([1, 3, 7, 64]), label="chunk")
    model = linear("rope", form, chunk)
    cuts = data.draw(
        st.lists(st.integers(1, TRAIN), min_size=2, max_size=5), label="lengths of row 0"
    )
    total = sum(cuts) + 2
    rows = [cuts, cuts[::-1]]
    tokens = ids(2, total)
    positions = packed(rows, length=TRAIN, pad=2)
    keep = data.draw(st.integers(1, total), label="keep")
    piece = data.draw(st.integers(1, total), label="piece")
    with torch.no_grad():
        out = model(tokens, positions)
        cache = model.make_cache(2, total)
        parts = []
        real = positions.document >= 0  # padding sees padding, and nobody asks what
        close(model(tokens, positions, keep=keep)[real[:, -keep:]], out[:, -keep:][real[:, -keep:]])
        for start in range(0, total, piece):
            here = part(positions, start, start + piece)
            parts.append(model(tokens[:, start : start + piece], here, cache=cache))
        close(torch.cat(parts, 1)[real], out[real])
        for r, lengths in enumerate(rows):
            start = 0
            for count in lengths:
                alone = model(
                    tokens[r : r + 1, start : start + count],
                    TokenPositions.plain(count, length=TRAIN),
                )
                close(out[r, start : start + count], alone[0])
                start += count


@every_form
@torch.no_grad()
def test_packed_documents_do_not_attend_to_each_other(form):
    """Not by one bit, though the sums of all documents are made at once; nor if a neighbor is enormous."""
    model = linear("rope", form, dtype=torch.float32)
    tokens = ids(1, 18)
    positions = packed([[5, 7, 6]])
    model.embed.weight[0] *= 1e6
    changed = tokens.clone()
    changed[:, :5], changed[:, 12:] = 0, 0
    before = model(tokens, positions)
    after = model(changed, positions)
    close(after[:, 5:12], before[:, 5:12], atol=0)
    assert (after[:, 4] - before[:, 4]).abs().max() > 1e-3


@every_form
@every_scheme
@torch.no_grad()
def test_kept_positions_equal_tail_of_full_forward(scheme, form):
    model = linear(scheme, form)
    length = reach_of(model)
    tokens = ids(2, length)
    positions = TokenPositions.plain(length)
    whole = model(tokens, positions)
    for keep in (length - 1, 6, 1):
        close(model(tokens, positions, keep=keep), whole[:, length - keep :])
    cache = model.make_cache(2, length)
    empty = model(tokens[:, :6], TokenPositions.plain(6, length=length), cache=cache, keep=0)
    assert empty.shape == (2, 0, V) and cache.filled == 6
    rest = TokenPositions.plain(length - 6, offset=6, length=length)
    close(model(tokens[:, 6:], rest, cache=cache, keep=2), whole[:, -2:])


@every_form
@torch.no_grad()
def test_cache_size_is_constant(form):
    model = linear("rope", form, dtype=torch.float32)

    def held(tokens: int) -> int:
        cache = model.make_cache(1, tokens)
        start = 0
        for size in (tokens // 2, tokens - tokens // 2 - 1, 1):
            model(ids(1, size), TokenPositions.plain(size, offset=start), cache=cache, keep=1)
            start += size
        with pytest.raises(ModelError, match=f"capacity of {tokens} tokens"):
            model(ids(1, 1), TokenPositions.plain(1, offset=start), cache=cache)
        sums = [memory.sums for memory in cache.layers]
        return sum(x.untyped_storage().nbytes() for s in sums for x in (s.values, s.keys))

    features = D if form == "numerator" else D + 1
    assert held(9) == held(301) == model.settings.layers * G * features * (D + 1) * 4
