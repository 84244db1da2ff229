"""Position remaps against dense matrices of distances, which loops over their formulas compute.

Heads have five pairs of features, and T is not a multiple of the chunk or group size.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from model import TokenPositions
from tests.model.alone import (
    attended,
    by_head,
    drawn,
    scheme_of,
    visible,
    weighted,
)
from tests.model.zoo import D, close

T = 23
THETA = 50.0
WINDOW = 6
SINKS = 3
KEPT = {"window": WINDOW, "sinks": SINKS}
PLAIN = TokenPositions.plain(T)


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


def string(s: int, w: int):
    return lambda n, m: n - m if n - m < s else n - m - s + w


def lambda_limit(limit: int):
    return lambda n, m: min(n - m, limit) if m < SINKS else n - m


def streaming(n, m):
    return min(n, SINKS + WINDOW - 1) - m if m < SINKS else n - m


# Settings of the scheme, and the distance of (n, m). L0 = 16 gives the sizes that are left out.
CASES = {
    "rerope": ({"name": "rerope", "distance": 4}, {}, rerope(4)),
    "rerope-default": ({"name": "rerope"}, {}, rerope(8)),
    "leaky": ({"name": "leaky_rerope", "distance": 5, "factor": 3.0}, {}, leaky(5, 3)),
    "leaky-default": ({"name": "leaky_rerope"}, {}, leaky(8, 16)),
    "leaky-auto": (
        {"name": "leaky_rerope", "factor": "auto", "distance": 6},
        {},
        leaky(6, (T - 6) / 10),
    ),
    "self-extend": ({"name": "self_extend", "neighbors": 6, "group": 3}, {}, self_extend(6, 3)),
    "self-extend-default": ({"name": "self_extend"}, {}, self_extend(8, 8)),
    "self-extend-rounded": ({"name": "self_extend", "group": 5}, {}, self_extend(5, 5)),
    "dual-chunk": ({"name": "dual_chunk", "chunk": 7, "local": 2}, {}, dual_chunk(7, 2)),
    "dual-chunk-default": ({"name": "dual_chunk"}, {}, dual_chunk(12, 2)),
    "string": ({"name": "string", "distance": 7, "local": 3}, {}, string(7, 3)),
    "string-default": ({"name": "string"}, {}, string(11, 2)),
    "string-zero": ({"name": "string", "distance": 5, "local": 0}, {}, string(5, 0)),
    "lambda": ({"name": "lambda", "limit": 4}, KEPT, lambda_limit(4)),
    "lambda-default": ({"name": "lambda"}, KEPT, lambda_limit(WINDOW)),
    "lambda-wide": ({"name": "lambda", "limit": 9}, KEPT, lambda_limit(9)),
    "streaming": ({"name": "streaming"}, KEPT, streaming),
}
every_case = pytest.mark.parametrize("case", CASES)
COMPOSED = ("rerope", "leaky", "self-extend", "dual-chunk", "string")


def matrix_of(distance, tokens: int = T) -> Tensor:
    """(T, T) the distance of every pair; 0 in the future."""
    matrix = torch.zeros(tokens, tokens, dtype=torch.float64)
    for m, n in itertools.combinations_with_replacement(range(tokens), 2):
        matrix[n, m] = distance(n, m)
    return matrix


def scores_of(q, k, mapped: Tensor, rotated: int, layout: str) -> Tensor:
    """(B, H, T, T) of q·k with the first `rotated` features rotated by distance · θ."""
    k = by_head(k)
    total = q[..., rotated:] @ k[..., rotated:].mT
    for pair in range(rotated // 2):
        features = (pair, pair + rotated // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        angle = mapped * THETA ** (-2 * pair / rotated)
        qa, qb = (q[..., n, None] for n in features)
        ka, kb = (k[..., None, :, n] for n in features)
        same = qa * ka + qb * kb
        crossed = qa * kb - qb * ka
        total = total + same * angle.cos() + crossed * angle.sin()
    return total


def check(
    case: str,
    tokens: TokenPositions = PLAIN,
    divisor: float = 1.0,
    amplitude: float = 1.0,
    rotated: int = D,
    kernel: str = "explicit",
    **keys,
) -> None:
    """Attention of a case with more settings against the dense matrix."""
    remap, window, distance = CASES[case]
    keys = {"theta": THETA, **window, **keys}
    scheme = scheme_of("rope", remap=keys.pop("remap", remap), **keys)
    count = tokens.order.shape[1]
    features = scheme.geometry.head_dim
    q, k, v = drawn(count, features=features)
    mapped = matrix_of(distance, count) / divisor
    scores = scores_of(q * amplitude, k * amplitude, mapped, rotated, scheme.settings.layout)
    expected = weighted(scores * features**-0.5, v, visible(tokens, count, **window))
    close(attended(scheme, tokens, q, k, v, kernel), expected)


@every_case
@pytest.mark.parametrize("kernel", ["merged", "explicit", "dense"])
def test_scores_use_remapped_distances(case, kernel, monkeypatch):
    monkeypatch.setattr("model.attention.kernels.QUERY_BLOCK", 4)
    check(case, kernel=kernel)


@every_case
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("features", "fraction", "rotated"),
    [
        (14, 1.0, 14),
        (10, 0.85, 8),
        (14, 0.5, 6),
    ],
)
def test_rotary_layouts_and_partial_rotation(case, layout, features, fraction, rotated):
    check(case, rotated=rotated, features=features, layout=layout, fraction=fraction)


@pytest.mark.parametrize("case", COMPOSED)
def test_remaps_compose_with_scaling_and_amplitude(case):
    """Interpolation divides remapped distances; an amplitude of 1.3 multiplies every score by its
    square."""
    check(case, divisor=2.5, scaling={"name": "linear", "factor": 2.5})
    scaling = {"name": "yarn", "factor": 1.0, "attention_factor": 1.3}
    check(case, amplitude=1.3, scaling=scaling)


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        (T, 64),
        (T, T),
        (16, 16),
    ],
)
def test_dual_chunk_amplitude_matches_released_code(tokens, length):
    """0.05 ln s + 1 on both cos and sin, s the declared length over L0, and none up to L0."""
    remap = {**CASES["dual-chunk"][0], "mscale": True}
    amplitude = 0.05 * math.log(length / 16) + 1
    positions = TokenPositions.plain(tokens, length=length)
    check("dual-chunk", positions, amplitude=amplitude, remap=remap)
    assert scheme_of("rope", remap=remap).depends_on_length
    assert not scheme_of("rope", remap=CASES["dual-chunk"][0]).depends_on_length
