"""Position remaps against dense matrices of distances, written from the specification in plain
Python.

Head dimensions have five feature pairs, and T is not a multiple of the chunk or group size.
"""

from __future__ import annotations

import math

import pytest
import torch

from model import TokenPositions
from tests.model.dense_remap import (
    L0,
    T,
    dense,
    drawn,
    matrix_of,
    scheme_of,
    shown_by,
    through,
)
from tests.model.zoo import build, close, ids


def rerope(w: float):
    return lambda n, m: min(n - m, w)


def leaky(w: float, s: float):
    return lambda n, m: n - m if n - m < w else w + (n - m - w) / s


def self_extend(w: int, g: int):
    return lambda n, m: n - m if n - m < w else math.floor(n / g) - math.floor(m / g) + w - w // g


def dual_chunk(c: int, local: int):
    s = c - local

    def distance(n, m):
        if math.floor(n / s) == math.floor(m / s):
            return n % s - m % s
        if math.floor(n / s) - math.floor(m / s) == 1:
            return min(n % s + s, c) - m % s
        return c - m % s

    return distance


# Settings of the remap, and the distance shown for (n, m). L0 = 16 gives the sizes that are left
# out.
CASES = {
    "rerope": ({"name": "rerope", "distance": 4}, rerope(4)),
    "rerope-default": ({"name": "rerope"}, rerope(8)),
    "leaky": ({"name": "leaky_rerope", "distance": 5, "factor": 3.0}, leaky(5, 3)),
    "leaky-default": ({"name": "leaky_rerope"}, leaky(8, 16)),
    "leaky-auto": (
        {"name": "leaky_rerope", "factor": "auto", "distance": 6},
        leaky(6, (T - 6) / 10),
    ),
    "self-extend": ({"name": "self_extend", "neighbors": 6, "group": 3}, self_extend(6, 3)),
    "self-extend-default": ({"name": "self_extend"}, self_extend(8, 8)),
    "self-extend-rounded": ({"name": "self_extend", "group": 5}, self_extend(5, 5)),
    "dual-chunk": ({"name": "dual_chunk", "chunk": 7, "local": 2}, dual_chunk(7, 2)),
    "dual-chunk-default": ({"name": "dual_chunk"}, dual_chunk(12, 2)),
}
every_case = pytest.mark.parametrize("case", CASES)


@every_case
@pytest.mark.parametrize("kernel", ["blocks", "dense"])
def test_scores_use_remapped_distances(case, kernel):
    remap, distance = CASES[case]
    q, k, v = drawn(T)
    found = through(scheme_of(remap), TokenPositions.plain(T), q, k, v, kernel)
    close(found, dense(q, k, v, matrix_of(list(range(T)), distance)))


@every_case
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("features", "fraction", "rotated"), [(14, 1.0, 14), (10, 0.85, 8), (14, 0.5, 6)]
)
def test_rotary_layouts_and_partial_rotation(case, layout, features, fraction, rotated):
    remap, distance = CASES[case]
    scheme = scheme_of(remap, features=features, layout=layout, fraction=fraction)
    q, k, v = drawn(T, features)
    expected = dense(q, k, v, matrix_of(list(range(T)), distance), rotated=rotated, layout=layout)
    close(through(scheme, TokenPositions.plain(T), q, k, v), expected)


@pytest.mark.parametrize("case", ["rerope", "leaky", "self-extend", "dual-chunk"])
def test_remaps_compose_with_scaling_and_amplitude(case):
    """Interpolation divides what a remap shows; an amplitude of 1.3 multiplies every score by its
    square."""
    remap, distance = CASES[case]
    q, k, v = drawn(T)
    shown = matrix_of(list(range(T)), distance)
    scheme = scheme_of(remap, scaling={"name": "linear", "factor": 2.5})
    close(through(scheme, TokenPositions.plain(T), q, k, v), dense(q, k, v, shown / 2.5))
    scheme = scheme_of(remap, scaling={"name": "yarn", "factor": 1.0, "attention_factor": 1.3})
    close(through(scheme, TokenPositions.plain(T), q, k, v), dense(q * 1.3, k * 1.3, v, shown))


def test_dual_chunk_amplitude_matches_released_code():
    """0.05 ln s + 1 on both cos and sin, s the declared length over L0, and none up to L0."""
    remap, distance = CASES["dual-chunk"]
    scheme = scheme_of({**remap, "mscale": True})
    (q, k, v) = drawn(T)
    shown = matrix_of(list(range(T)), distance)
    for length, amplitude in ((64, 0.05 * math.log(4) + 1), (T, 0.05 * math.log(T / 16) + 1)):
        expected = dense(q * amplitude, k * amplitude, v, shown)
        close(through(scheme, TokenPositions.plain(T, length=length), q, k, v), expected)
    assert scheme.depends_on_length and not scheme_of(remap).depends_on_length
    q, k, v = drawn(L0)
    shown = matrix_of(list(range(L0)), distance)
    close(through(scheme, TokenPositions.plain(L0), q, k, v), dense(q, k, v, shown))


def test_self_extend_matches_paper_figure():
    """Ten tokens, groups of two, four neighbors: the last query sees the first key six away."""
    shown = shown_by({"name": "self_extend", "neighbors": 4, "group": 2}, 10)
    assert [round(x) for x in shown[9].tolist()] == [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    assert [round(x) for x in shown[6, :7].tolist()] == [5, 5, 4, 3, 2, 1, 0]


def test_dual_chunk_matches_paper_figure():
    """Chunks of six and distances up to nine (their c − 1), the four nearest queries unclipped."""
    shown = shown_by({"name": "dual_chunk", "chunk": 9, "local": 3}, 18)
    # Keys stand at 0..5 again and again; from the next chunk queries stand at 6 7 8 9 9 9, later at
    # 9.
    rows = {
        5: [5, 4, 3, 2, 1, 0],
        6: [6, 5, 4, 3, 2, 1, 0],
        9: [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        11: [9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0],
        12: [9, 8, 7, 6, 5, 4, 6, 5, 4, 3, 2, 1, 0],
        17: [9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0],
    }
    for n, row in rows.items():
        assert [round(x) for x in shown[n, : n + 1].tolist()] == row, n


# (remap, number of tokens up to which it is plain RoPE, exactly)
PLAIN = [
    ({"name": "rerope", "distance": 7}, 8),
    ({"name": "leaky_rerope", "distance": 7, "factor": 2.0}, 8),
    ({"name": "leaky_rerope", "distance": 3, "factor": 1.0}, None),
    ({"name": "self_extend", "neighbors": 6, "group": 3}, 7),
    ({"name": "self_extend", "neighbors": 6, "group": 1}, None),
    ({"name": "dual_chunk", "chunk": 7, "local": 2}, 8),
]


@pytest.mark.parametrize(("remap", "tokens"), PLAIN)
@torch.no_grad()
def test_remap_equals_rope_at_short_distances_only(remap, tokens):
    """Through the whole model. With w = 7 the distance 7 is shown as it is, so 8 tokens are."""
    ours = build({"name": "rope", "remap": remap})
    plain = build("rope")
    for count in range(1, 14):
        text = ids(2, count)
        apart = (
            (ours(text, TokenPositions.plain(count)) - plain(text, TokenPositions.plain(count)))
            .abs()
            .max()
        )
        assert (apart < 1e-10) == (tokens is None or count <= tokens), count
