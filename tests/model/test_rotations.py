"""xPos, learned frequencies, FoPE and PoPE against their formulas.

Every score is computed in float64, head by head and pair by pair, from the published formula.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from model import SCHEMES, ModelError, TokenPositions, Transformer
from model.attention.kernels import attend
from model.position import HeadGeometry
from model.position.rotation import rotate
from model.position.schemes.pope import Pope
from model.position.schemes.xpos import XPos
from tests.model.alone import at
from tests.model.dense_remap import B, D, G, H, context_of, drawn
from tests.model.rotated import (
    L0,
    LAYOUTS,
    POSITIONS,
    THETA,
    answers,
    by_head,
    distances,
    made,
    pair_of,
    rope_pair,
    spelled_out,
    through,
)
from tests.model.zoo import LAYERS, V, close, ids, settings_of


def test_angles_per_head_rotate_each_head_separately():
    q, _, _ = drawn(7)
    angles = torch.rand(1, H, 7, 4, dtype=torch.float64) * 6
    cos = angles.cos()
    sin = angles.sin()
    for layout in LAYOUTS:
        turned = rotate(q, cos, sin, layout)
        for h in range(H):
            alone = rotate(q[:, h : h + 1], cos[:, h], sin[:, h], layout)
            close(turned[:, h : h + 1], alone, atol=0)


# Learned frequencies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", ["model", "layer", "head"])
def test_learned_frequencies_are_exponentials_of_the_parameters(share, layout):
    scheme = made("learned_rope", share=share, layout=layout)
    (q, k, v) = drawn(len(POSITIONS))
    ratios = scheme.log_ratio.detach()
    d = distances(POSITIONS)
    assert ratios.shape == ((G, D // 2) if share == "head" else (D // 2,)) and ratios.std() > 0.1

    def score(q, k, group, pair):
        learned = float(ratios[group, pair] if share == "head" else ratios[pair])
        omega = math.log(THETA) * (-2 * pair / D) + learned
        return rope_pair(q, k, pair_of(pair, layout), d * math.exp(omega))

    found = through(scheme, at(POSITIONS, 9000), q, k, v)
    close(found, answers(spelled_out(q, k, score), v), atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", ["model", "layer", "head"])
@torch.no_grad()
def test_initial_learned_frequencies_equal_rope(share, layout):
    both = [
        Transformer(settings_of({"name": name, "layout": layout, **keys}), V, L0)
        .double()
        .initialize(4)
        for name, keys in (("rope", {}), ("learned_rope", {"share": share}))
    ]
    tokens = ids(2, 19)
    close(
        both[1](tokens, TokenPositions.plain(19)),
        both[0](tokens, TokenPositions.plain(19)),
        atol=1e-12,
    )
    assert len(both[1].position) == (1 if share == "model" else LAYERS)


@torch.no_grad()
def test_learned_angles_are_accurate_at_a_million():
    """math.cos reduces its argument exactly; an angle in float32 would be off by up to 0.06."""
    for dtype in (torch.float32, torch.bfloat16):
        scheme = made("learned_rope", features=64, theta=10_000.0, spread=0).to(dtype)
        (start,) = scheme.tables(TokenPositions.plain(1), torch.float32)[0]
        cos, sin = scheme._turns(torch.tensor([[999_983]]), start)
        assert cos.dtype == torch.float32
        for pair in range(32):
            angle = 999_983 * 10_000.0 ** (-pair / 32)
            assert float(cos[0, 0, pair]) == pytest.approx(math.cos(angle), abs=3e-7)
            assert float(sin[0, 0, pair]) == pytest.approx(math.sin(angle), abs=3e-7)


# xPos


def test_xpos_scores_match_released_code():
    """Typed from torchscale's xpos_relative_position.py; interleaved pairs, S = 512, γ = 0.4."""
    scheme, (q, k, v), count = made("xpos", theta=10_000.0), drawn(29), 29
    scale = (torch.arange(0, D, 2, dtype=torch.float64) + 0.4 * D) / (1.4 * D)
    low = -count // 2
    scale = scale ** (torch.arange(low, count + low, dtype=torch.float64) / 512)[:, None]
    angles = torch.arange(count, dtype=torch.float64)[:, None] / 10_000 ** (
        torch.arange(D // 2, dtype=torch.float64) / (D // 2)
    )

    def turned(x, scale):
        every_two = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        cos, sin = ((f * scale).repeat_interleave(2, dim=-1) for f in (angles.cos(), angles.sin()))
        return x * cos + every_two * sin

    scores = turned(q, scale) @ turned(by_head(k), 1 / scale).transpose(-1, -2)
    close(through(scheme, TokenPositions.plain(count), q, k, v), answers(scores, v))


def test_xpos_maximum_length_avoids_float32_overflow():
    """Outputs and gradients of the last positions are as good as anywhere; the next one is
    refused."""
    settings = SCHEMES["xpos"][0]()
    scheme = XPos(settings, HeadGeometry(28, H, D, L0, L0, G))
    assert scheme.limit == 26_157  # 64·512 / ln 3.5 = 26156.6
    last = range(scheme.limit - 12, scheme.limit)
    results = []
    for dtype in (torch.float64, torch.float32):
        q, k, v = (x.to(dtype).requires_grad_() for x in drawn(12))
        positions = at(list(last), 1)
        plan = scheme.plan(
            replace(context_of(scheme, positions), tables=scheme.tables(positions, dtype))
        )
        out = attend(plan.read(q, plan.write(k)), v, D**-0.5)
        (out.square().sum() * 1e-8).backward()  # of the size of a mean over a large batch
        results.append((out.detach(), q.grad * 1e8, k.grad * 1e8))
    for exact, found in zip(*results, strict=True):
        close(found.double(), exact, atol=1e-4)
    model = Transformer(settings_of({"name": "xpos"}), V, L0)
    with pytest.raises(ModelError, match=r"'xpos' .* 26156"):
        model(ids(1, 2), at([0, scheme.limit], 1))


# FoPE


@pytest.mark.parametrize("clipped", ["identity", "ones"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fope_mixes_kept_frequencies(layout, clipped):
    scheme = made("fope", layout=layout, clipped=clipped, max_length=40)
    (q, k, v) = drawn(len(POSITIONS))
    kept = [
        THETA ** (-2 * p / D) for p in range(D // 2) if THETA ** (-2 * p / D) >= 2 * math.pi / 40
    ]
    assert len(kept) == 3 and scheme.cos_mix.shape == (G, 3, 3)
    n = torch.tensor(POSITIONS, dtype=torch.float64)

    def turned(x, group, pair):  # x (B, T, D) → the pair's two features
        a, b = (x[..., f] for f in pair_of(pair, layout))
        if pair < 3:
            cos = sum(scheme.cos_mix[group, j, pair] * (n * kept[j]).cos() for j in range(3))
            sin = sum(scheme.sin_mix[group, j, pair] * (n * kept[j]).sin() for j in range(3))
        else:
            cos = 1.0
            sin = 1.0 if clipped == "ones" else 0.0
        return a * cos - b * sin, a * sin + b * cos

    def score(q, k, group, pair):
        (qa, qb), (ka, kb) = turned(q, group, pair), turned(k, group, pair)
        return qa[..., None] * ka[..., None, :] + qb[..., None] * kb[..., None, :]

    close(
        through(scheme, at(POSITIONS, 9000), q, k, v),
        answers(spelled_out(q, k, score), v),
        atol=1e-9,
    )


# PoPE


def test_pope_of_two_tokens_by_hand():
    """Frequencies 1 and 1/10; a key at 2 and a query at 3, so that d = 1. Magnitudes 1, 2 and 3,
    1/2; phases −π/2 and −π. Score: 1·3·cos(1 + π/2) + 2·½·cos(0.1 + π) = −3 sin 1 − cos 0.1."""
    scheme = Pope(SCHEMES["pope"][0](theta=100.0), HeadGeometry(4, H, 2, L0, L0, G)).double()
    with torch.no_grad():
        scheme.phase.copy_(torch.tensor([-math.pi / 2, -math.pi]))
    inverse = [math.log(math.expm1(m)) for m in (1, 2, 3, 0.5)]  # of softplus
    q = torch.tensor(inverse[:2]).double().expand(B, H, 2, 2)
    k = torch.tensor(inverse[2:]).double().expand(B, G, 2, 2)
    plan = scheme.plan(context_of(scheme, at([2, 3], 4)))
    (view,) = plan.read(q, plan.write(k))
    assert view.q.shape == (B, H, 2, 4) and view.k.shape == (B, G, 2, 4)
    score = (view.q[0, 0, 1] @ view.k[0, 0, 0]).item()
    assert score == pytest.approx(-3 * math.sin(1) - math.cos(0.1), abs=1e-6)
    assert not plan.linear  # a temperature scales the queries of the view


# Gradients and settings
