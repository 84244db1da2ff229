"""xPos, learned frequencies, FoPE and PoPE against their formulas.

Every score is computed in float64, head by head and pair by pair, from the published formula.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError

from model import SCHEMES, ModelError, ModelSettings, TokenPositions, Transformer
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
from tests.model.zoo import LAYERS, V, build, close, ids, settings_of

NAMES = ("learned_rope", "xpos", "fope", "hyperbolic", "pope")


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_xpos_equals_rope_times_decay(layout):
    scheme = made("xpos", layout=layout, scale_base=100.0, gamma=0.7)
    (q, k, v) = drawn(len(POSITIONS))
    d = distances(POSITIONS)

    def score(q, k, group, pair):
        zeta = (2 * pair + 0.7 * D) / (1.7 * D)
        return zeta ** (d / 100) * rope_pair(
            q, k, pair_of(pair, layout), d * THETA ** (-2 * pair / D)
        )

    close(
        through(scheme, at(POSITIONS, 9000), q, k, v),
        answers(spelled_out(q, k, score), v),
        atol=1e-9,
    )


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


@torch.no_grad()
def test_xpos_without_decay_is_rope():
    one = build({"name": "xpos", "gamma": 1e15})
    other = build({"name": "rope", "layout": "interleaved"})
    other.load_state_dict(one.state_dict())
    close(one(ids(2, 19), TokenPositions.plain(19)), other(ids(2, 19), TokenPositions.plain(19)))


def test_xpos_maximum_length_avoids_float32_overflow():
    """Outputs and gradients of the last positions are as good as anywhere; the next one is refused."""
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


def test_fope_with_identity_mixture_is_rope():
    q, k, v = drawn(len(POSITIONS))
    fope = made("fope", spread=0, gain=0, max_length=10_000)
    assert torch.equal(fope.cos_mix, torch.eye(D // 2).double().expand(G, -1, -1))
    found = through(fope, at(POSITIONS, 9000), q, k, v)
    close(found, through(made("rope"), at(POSITIONS, 9000), q, k, v), atol=1e-12)


def test_fope_initialization():
    scheme = made("fope", features=128, spread=0, gain=0.6, max_length=10_000, theta=500.0)
    for mix in (scheme.cos_mix, scheme.sin_mix):
        noise = mix.detach() - torch.eye(64)
        assert float(noise.std()) == pytest.approx(0.6 * math.sqrt(2 / (64 + 64)), rel=0.05)
        assert abs(float(noise.mean())) < 0.005
    assert not torch.equal(scheme.cos_mix, scheme.sin_mix)


# PoPE


def test_pope_of_two_tokens_by_hand():
    """Frequencies 1 and 1/10; a key at 2 and a query at 3, so that d = 1. Magnitudes 1, 2 and 3, 1/2; phases
    −π/2 and −π. Score: 1·3·cos(1 + π/2) + 2·½·cos(0.1 + π) = −3 sin 1 − cos 0.1."""
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


@pytest.mark.parametrize("share", ["model", "layer", "head"])
def test_pope_scores_are_magnitudes_times_cosines(share):
    scheme = made("pope", share=share, phase="uniform")
    (q, k, v) = drawn(len(POSITIONS))
    d = distances(POSITIONS)
    phase = scheme.phase.detach()
    scores = torch.zeros(B, H, len(d), len(d), dtype=torch.float64)
    for h in range(H):
        g = h // (H // G)
        for c in range(D):
            delta = phase[g, c] if share == "head" else phase[c]
            sizes = torch.log1p(q[:, h, :, None, c].exp()) * torch.log1p(k[:, g, None, :, c].exp())
            scores[:, h] += sizes * (d * THETA ** (-c / D) - delta).cos()
    close(through(scheme, at(POSITIONS, 9000), q, k, v), answers(scores, v), atol=1e-9)


def test_pope_initial_phases():
    assert (made("pope", spread=0).phase == 0).all()
    drawn_phase = made("pope", features=512, spread=0, phase="uniform").phase.detach()
    assert drawn_phase.min() > -2 * math.pi and drawn_phase.max() < 0
    assert float(drawn_phase.mean()) == pytest.approx(-math.pi, abs=0.4)


# Gradients and settings


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("learned_rope", {"share": "head"}),
        ("learned_rope", {"layout": "interleaved"}),
        ("fope", {"max_length": 40}),
        ("hyperbolic", {"damping": "learned", "fastest": 0.3}),
        ("pope", {"share": "head"}),
        ("pope", {}),
    ],
)
def test_gradients_match_finite_differences(name, keys):
    """Central differences, every entry, over positions that skip."""
    scheme = made(name, **keys)
    positions = at(POSITIONS[:20], 60)
    (q, k, v) = drawn(20)
    weights = torch.randn(
        B, H, 20, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )

    def loss() -> torch.Tensor:
        return (through(scheme, positions, q, k, v) * weights).sum()

    loss().backward()
    assert list(scheme.parameters())
    for p in scheme.parameters():
        for entry in range(p.numel()):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    p.view(-1)[entry] += step
                    values.append(float(loss()))
                    p.view(-1)[entry] -= step
            assert float(p.grad.view(-1)[entry]) == pytest.approx(
                (values[0] - values[1]) / 2e-6, abs=2e-6
            )
        assert p.grad.abs().max() > 1e-2


@pytest.mark.parametrize(
    "position",
    [
        {"name": "learned_rope", "share": "token"},
        {"name": "xpos", "scale_base": 0},
        {"name": "xpos", "gamma": 0},
        {"name": "fope", "gain": -0.1},
        {"name": "fope", "clipped": "zero"},
        {"name": "hyperbolic", "margin": 0},
        {"name": "hyperbolic", "fastest": 0},
        {"name": "pope", "phase": "pi"},
        {"name": "pope", "theta": 1},
    ],
)
def test_values_out_of_range_are_rejected(position):
    with pytest.raises(ValidationError, match=list(position)[1]):
        ModelSettings(position=position)


@pytest.mark.parametrize("name", NAMES)
def test_rotations_require_even_head_dim_and_pope_does_not(name):
    settings = ModelSettings(dim=45, heads=3, position={"name": name})
    if name == "pope":
        assert (
            Transformer(settings, V, L0)
            .initialize(0)(ids(1, 4), TokenPositions.plain(4))
            .isfinite()
            .all()
        )
        return
    with pytest.raises(ModelError, match=f"{name} .* even .* got 15: change model.dim"):
        Transformer(settings, V, L0)


def test_fope_requires_a_frequency():
    with pytest.raises(ModelError, match=r"2π/5: raise model\.position\.max_length"):
        Transformer(settings_of({"name": "fope"}), V, 5)


@pytest.mark.parametrize("name", NAMES)
def test_example_configs_build(name):
    folder = Path(__file__).resolve().parents[2] / "configs" / "position"
    keys = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))["model"]
    assert Transformer(settings_of(keys["position"]), V, L0).settings.position.name == name
