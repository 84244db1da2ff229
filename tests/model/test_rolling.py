"""Layers with a window cache only the keys they can still attend to, with equal results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import TokenPositions
from tests.model.zoo import build, close, ids, packed

LONG = 61
ROLLING = {
    "rope": {"name": "rope", "window": 5},
    "rope-sinks": {"name": "rope", "window": 5, "sinks": 3},
    "alibi-sinks": {"name": "alibi", "window": 4, "sinks": 1},
    "none-window-of-one": {"name": "none", "window": 1},
    "none-sinks": {
        "name": "none",
        "window": 1,
        "sinks": 2,
        "temperature": {"name": "log_n", "length": 2},
    },
    "pattern": {
        "name": "pattern",
        "layers": ["near", "far"],
        "kinds": {"near": {"name": "rope", "window": 6, "sinks": 2}, "far": {"name": "none"}},
    },
}
every = pytest.mark.parametrize("case", ROLLING)


def piece(positions: TokenPositions, start: int, stop: int) -> TokenPositions:
    """Tokens start ... stop − 1, as a loop over a prepared batch cuts them."""
    return positions.part(start, stop, position_end=int(positions.position[:, :stop].max()) + 1)


def layouts() -> dict[str, TokenPositions]:
    return {
        "plain": TokenPositions.plain(LONG),
        "ragged": TokenPositions.left_padded([LONG, 4, LONG - 7], LONG),
        "packed": packed([[20, LONG - 20], [LONG], [1, 2, 3, 30, LONG - 36]]),
    }


@every
@pytest.mark.parametrize("layout", ["plain", "ragged", "packed"])
@settings(max_examples=2)
@given(data=st.data())
def test_chunked_cache_matches_full_forward(case, layout, data):
    model = build(ROLLING[case])
    tokens = ids(3, LONG)
    positions = layouts()[layout]
    sizes = []
    start = 0
    parts = []
    while start < LONG:
        size = data.draw(st.one_of(st.just(1), st.integers(1, LONG)), label="tokens of the pass")
        sizes.append(min(size, LONG - start))
        start += sizes[-1]
    with torch.no_grad():
        whole = model(tokens, positions)
        cache = model.make_cache(3, LONG)
        start = 0
        for size in sizes:
            parts.append(
                model(
                    tokens[:, start : start + size],
                    piece(positions, start, start + size),
                    cache=cache,
                )
            )
            start += size
    real = positions.document.expand(3, -1) >= 0
    close(torch.cat(parts, dim=1)[real], whole[real])


@every
@torch.no_grad()
def test_memory_is_bounded_by_window(case):
    model = build(ROLLING[case])
    tokens = ids(1, 1)
    cache = model.make_cache(1, 4000)
    for n in range(60):
        model(tokens, TokenPositions.plain(1, offset=n, length=4000), cache=cache)
    for memory, kind in zip(cache.layers, model.settings.layer_kinds, strict=True):
        choice = model.kinds[kind].position
        slots = memory._buffers["k"].shape[2]
        assert slots == (4000 if choice.window is None else 2 * choice.window + choice.sinks)
    assert cache.filled == 60


@torch.no_grad()
def test_rolling_cache_with_noncontiguous_positions():
    """Distances come from positions, eviction from order."""
    for case in ("rope-sinks", "alibi-sinks"):
        model = build(ROLLING[case])
        tokens = ids(2, LONG)
        plain = TokenPositions.plain(LONG)
        positions = replace(
            plain, position=plain.position * 3 + 1, position_end=3 * LONG + 1, unit_steps=False
        )
        whole = model(tokens, positions)
        cache = model.make_cache(2, LONG)
        parts = []
        for n in range(LONG):
            parts.append(model(tokens[:, n : n + 1], piece(positions, n, n + 1), cache=cache))
        close(torch.cat(parts, dim=1), whole)
