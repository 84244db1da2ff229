"""xPos, learned frequencies, FoPE, PoPE and hyperbolic rotations against their formulas.

Every score is computed in float64, head by head and pair by pair, from the published formula.
Positions are large, fractional and have gaps; 37 tokens are two blocks of 16 and a remainder.
"""

import math

import pytest
import torch
from torch import Tensor

from model import TokenPositions
from tests.model.alone import (
    B,
    at,
    attended,
    by_head,
    context_of,
    distances,
    doubles,
    drawn,
    put,
    scheme_of,
    weighted,
)
from tests.model.zoo import D, G, H, close

THETA = 50.0
POSITIONS = [0, 1, 2, 4.5, 5, 5.25, 9, 30, 31, 32.5]
POSITIONS += [*range(33, 53), 90, 91, 91.5, 92, 700, 701, 5000]
TOKENS = at(POSITIONS, 9000)
LAYOUTS = ["half", "interleaved"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_share = pytest.mark.parametrize("share", ["model", "layer", "head"])


def pair_of(x: Tensor, k: int, layout: str) -> tuple[Tensor, Tensor]:
    """The features (·, T) of a pair of x (·, T, D)."""
    first, second = (k, k + D // 2) if layout == "half" else (2 * k, 2 * k + 1)
    return x[..., first], x[..., second]


def products(a: Tensor, b: Tensor) -> Tensor:
    """(B, T) and (B, T) → (B, T, T)."""
    return a[..., :, None] * b[..., None, :]


def scores_of(q: Tensor, k: Tensor, score) -> Tensor:
    """(B, H, T, T) of score(q (B, T, D), k, key/value head, pair), summed over pairs."""
    k = by_head(k)
    heads = []
    for h in range(H):
        group = h // (H // G)
        scores = [score(q[:, h], k[:, h], group, pair) for pair in range(D // 2)]
        heads.append(sum(scores))
    return torch.stack(heads, dim=1) * D**-0.5


@every_layout
@every_share
def test_learned_frequencies_are_exponentials_of_the_parameters(share, layout):
    scheme = scheme_of("learned_rope", spread=0.4, theta=THETA, share=share, layout=layout)
    q, k, v = drawn(len(POSITIONS))
    ratios = scheme.log_ratio.detach()
    assert ratios.shape == ((G, D // 2) if share == "head" else (D // 2,))
    assert ratios.std() > 0.1
    d = distances(POSITIONS)

    def score(q, k, group, pair):
        ratio = float(ratios[group, pair] if share == "head" else ratios[pair])
        angle = d * math.exp(math.log(THETA) * (-2 * pair / D) + ratio)
        qa, qb = pair_of(q, pair, layout)
        ka, kb = pair_of(k, pair, layout)
        same = products(qa, ka) + products(qb, kb)
        return same * angle.cos() + (products(qa, kb) - products(qb, ka)) * angle.sin()

    close(attended(scheme, TOKENS, q, k, v), weighted(scores_of(q, k, score), v), atol=1e-9)


def test_xpos_scores_match_released_code():
    """Typed from torchscale's xpos_relative_position.py; interleaved pairs, S = 512, γ = 0.4."""
    count = 29
    q, k, v = drawn(count)
    n = torch.arange(count, dtype=torch.float64)[:, None]
    base = (torch.arange(0, D, 2, dtype=torch.float64) + 0.4 * D) / (1.4 * D)
    scale = base ** ((n - count // 2) / 512)
    angles = n / 10_000 ** (torch.arange(D // 2, dtype=torch.float64) / (D // 2))

    def rotated(x, scale):
        even = x[..., ::2]
        odd = x[..., 1::2]
        every_two = torch.stack((-odd, even), dim=-1).flatten(-2)
        cos = (angles.cos() * scale).repeat_interleave(2, dim=-1)
        sin = (angles.sin() * scale).repeat_interleave(2, dim=-1)
        return x * cos + every_two * sin

    scores = rotated(q, scale) @ rotated(by_head(k), 1 / scale).mT * D**-0.5
    ours = attended(scheme_of("xpos"), TokenPositions.plain(count), q, k, v)
    close(ours, weighted(scores, v))


@every_layout
@pytest.mark.parametrize("clipped", ["identity", "ones"])
def test_fope_mixes_kept_frequencies(layout, clipped):
    keys = {"theta": THETA, "layout": layout, "clipped": clipped, "max_length": 40}
    scheme = scheme_of("fope", spread=0.4, **keys)
    q, k, v = drawn(len(POSITIONS))
    spectrum = [THETA ** (-2 * pair / D) for pair in range(D // 2)]
    kept = doubles([theta for theta in spectrum if theta >= 2 * math.pi / 40])
    assert len(kept) == 3
    assert scheme.cos_mix.shape == (G, 3, 3)
    angles = doubles(POSITIONS)[:, None] * kept

    def rotated(x, group, pair):
        a, b = pair_of(x, pair, layout)
        if pair >= 3:
            sin = float(clipped == "ones")
            return a - b * sin, a * sin + b
        cos = angles.cos() @ scheme.cos_mix[group, :, pair]
        sin = angles.sin() @ scheme.sin_mix[group, :, pair]
        return a * cos - b * sin, a * sin + b * cos

    def score(q, k, group, pair):
        qa, qb = rotated(q, group, pair)
        ka, kb = rotated(k, group, pair)
        return products(qa, ka) + products(qb, kb)

    close(attended(scheme, TOKENS, q, k, v), weighted(scores_of(q, k, score), v), atol=1e-9)


def test_hyperbolic_hope_is_a_decay_of_each_channel():
    """Dai et al.'s matrix of cosh and sinh, pair by pair as printed."""
    q, k, v = drawn(21)
    d = distances(range(21))

    def printed(q, k, group, pair):
        theta = 0.7 * THETA ** (-2 * pair / D)
        qa, qb = pair_of(q, pair, "half")
        ka, kb = pair_of(k, pair, "half")
        same = products(qa, ka) + products(qb, kb)
        crossed = products(qa, kb) + products(qb, ka)
        damping = (-d * 0.7 * (1 + 0.3)).exp()
        return damping * ((d * theta).cosh() * same + (d * theta).sinh() * crossed)

    scores = scores_of(q, k, printed)
    scheme = scheme_of("hyperbolic", theta=THETA, fastest=0.7, margin=0.3)
    for kernel in ("auto", "dense"):
        ours = attended(scheme, TokenPositions.plain(21), q, k, v, kernel)
        close(ours, weighted(scores, v), atol=1e-12)


def test_pope_of_two_tokens_by_hand():
    """Frequencies 1 and 1/10; a key at 2 and a query at 3, so that d = 1. Magnitudes 1, 2 and 3,
    1/2; phases −π/2 and −π. Score: 1·3·cos(1 + π/2) + 2·½·cos(0.1 + π) = −3 sin 1 − cos 0.1."""
    scheme = put(scheme_of("pope", features=2, theta=100.0), phase=[-math.pi / 2, -math.pi])
    inverse = doubles([math.log(math.expm1(m)) for m in (1, 2, 3, 0.5)])  # of softplus
    plan = scheme.plan(context_of(scheme, at([2, 3], 4)))
    k = plan.write(inverse[2:].expand(B, G, 2, 2))
    (view,) = plan.read(inverse[:2].expand(B, H, 2, 2), k)
    assert view.q.shape == (B, H, 2, 4)
    assert view.k.shape == (B, G, 2, 4)
    score = (view.q[0, 0, 1] @ view.k[0, 0, 0]).item()
    assert score == pytest.approx(-3 * math.sin(1) - math.cos(0.1), abs=1e-6)
    assert not plan.linear  # a temperature scales the queries of the view
