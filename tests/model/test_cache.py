"""Growing caches: eviction, growth, selection of rows, skipped positions, and refused calls."""

import itertools
from dataclasses import replace

import pytest
import torch

from model import ModelError, TokenPositions, Transformer
from tests.model.zoo import T, build, close, ids, shared

YARN = {"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}}
ROLLING = ["rope-window", "rope-sinks", "alibi-window", "none-sinks", "pattern-none"]


def passes(model: Transformer, cache, tokens, positions: TokenPositions, edges: list[int]):
    """(B, T, V) logits of the tokens between consecutive edges, one pass after the other."""
    out = []
    for start, stop in itertools.pairwise(edges):
        if stop > cache.capacity:
            cache.grow(stop)
        end = int(positions.position[:, :stop].max()) + 1
        new = positions.part(start, stop, position_end=end)
        out.append(model(tokens[:, start:stop], new, cache=cache))
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("case", ROLLING)
@torch.no_grad()
def test_memory_is_bounded_by_window(case):
    model = build(case)
    cache = model.make_cache(1, 4000)
    passes(model, cache, ids(1, 60), TokenPositions.plain(60, length=4000), [*range(61)])
    for memory, kind in zip(cache.layers, model.settings.layer_kinds, strict=True):
        choice = model.kinds[kind].position
        slots = memory._buffers["k"].shape[2]
        assert slots == (4000 if choice.window is None else 2 * choice.window + choice.sinks)
    assert cache.filled == 60


GROWING = ["rope", "rope-window", "none-sinks", "fox", "pattern-alibi", "hybrid-window"]


@pytest.mark.parametrize("case", GROWING)
@pytest.mark.parametrize("counts", [[T, T], [T, T - 3]], ids=str)
@torch.no_grad()
def test_a_cache_grows_while_it_is_used(case, counts):
    model = build(case)
    tokens = ids(2, T)
    positions = TokenPositions.left_padded(counts, T)
    if counts[1] == T:
        positions = TokenPositions.plain(T)
    grown = passes(model, model.make_cache(2, 4), tokens, positions, [0, 4, 7, 8, T])
    whole = model(tokens, positions)
    for row, count in enumerate(counts):
        close(grown[row, -count:], whole[row, -count:])


@pytest.mark.parametrize("case", [*GROWING, "hybrid-heads", "rope-ntk-auto", "sinusoidal-auto"])
@pytest.mark.parametrize("layout", ["plain", "shifted", "ragged"])
@torch.no_grad()
def test_selected_rows_of_a_cache(case, layout):
    """Rows are repeated and reordered, as in beam search, and continue as if they had always been
    there, each with its declared length; `shifted` rows differ in their positions alone."""
    model = build(case)
    tokens = ids(3, T)
    counts = [T, T - 3, T - 1]
    lengths = [T, 5 * T, 2 * T]
    rows = torch.tensor([2, 0, 2, 1])

    def positions(rows: list[int]) -> TokenPositions:
        declared = [lengths[row] for row in rows]
        plain = TokenPositions.plain(T)
        if layout == "plain":
            return replace(plain, lengths=tuple(declared))
        if layout == "shifted":
            position = plain.order + torch.tensor(rows)[:, None]
            return replace(plain, position=position, position_end=T + 2, unit_steps=False)
        return TokenPositions.left_padded([counts[row] for row in rows], T, lengths=declared)

    before = positions([0, 1, 2])
    half = T - 5
    cache = model.make_cache(3, T)
    passes(model, cache, tokens, before, [0, half])
    cache.select_rows(rows)
    decoded = passes(model, cache, tokens[rows], positions(rows.tolist()), [half, T])
    close(decoded, model(tokens, before)[rows, half:])


# Settings, capacity, positions of a first and of a refused pass, and words of the error.
FIRST = TokenPositions.plain(8)
RAGGED = TokenPositions.left_padded([8, 3], 8)
REFUSED = [
    (YARN, 20, FIRST, TokenPositions.plain(3, offset=8), "declared length .*8.* to .*11"),
    ("rope", 20, FIRST, TokenPositions.left_padded([8, 8], 1, offset=8), "plain .* ragged layout"),
    ("rope", 20, RAGGED, TokenPositions.left_padded([8], 1, offset=8), "2 rows .* 1"),
    ("rope", 10, FIRST, TokenPositions.plain(3, offset=8), "10 tokens, got 11"),
    ("learned", 20, FIRST, TokenPositions.plain(4, offset=8), "11 positions, .* needs 12"),
]


@pytest.mark.parametrize(("case", "capacity", "first", "second", "words"), REFUSED)
@torch.no_grad()
def test_refused_passes_leave_the_cache_unchanged(case, capacity, first, second, words):
    model = build(case)
    tokens = ids(2, 12)
    cache = model.make_cache(2, capacity)
    model(tokens[:, :8], first, cache=cache)
    with pytest.raises(ModelError, match=words):
        model(tokens[:, 8 : 8 + second.order.shape[1]], second, cache=cache)
    assert cache.filled == 8
    if first is FIRST and case is not YARN:
        after = TokenPositions.plain(2, offset=8)
        found = model(tokens[:, 8:10], after, cache=cache)
        close(found, model(tokens[:, :10])[:, 8:])


def test_a_cache_requires_no_grad():
    model = build("rope")
    with pytest.raises(ModelError, match="no_grad"):
        model(ids(1, 4), cache=model.make_cache(1, 9))


@pytest.mark.parametrize("case", ["rope", "alibi", "t5-window", "kerple"])
@torch.no_grad()
def test_tokens_after_a_gap_of_positions(case):
    """Six tokens, then three at positions 9 to 11, against one pass at these positions."""
    model = shared(case)
    tokens = ids(2, 9)
    first = TokenPositions.plain(6, length=12)
    later = TokenPositions.plain(3, offset=9, length=12)
    cache = model.make_cache(2, 9)
    parts = [
        model(tokens[:, :6], first, cache=cache),
        model(tokens[:, 6:], later, cache=cache),
    ]
    order = torch.cat([first.order, later.order], dim=1)
    places = replace(later, order=order, position=order, unit_steps=False)
    close(torch.cat(parts, dim=1), model(tokens, places))
