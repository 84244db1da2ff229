"""PaTH and content-dependent rotations against products computed token by token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from model import SCHEMES, TokenPositions, Transformer
from model.position import AttentionContext, HeadGeometry, PositionalScheme
from tests.model.alone import doubles
from tests.model.spelled import (
    LAYOUTS,
    C,
    D,
    S,
    by_documents,
    convolved,
    extras_of,
    layouts,
    normal,
    output_of,
    real,
    scheme_of,
    turned,
)
from tests.model.zoo import G, H, V, close, ids, settings_of


def reflected(scheme: PositionalScheme):
    """Logits by the product of the matrices between query and key."""

    def logits_of(x, q, k):
        z = convolved(x, scheme.down, scheme.up, scheme.conv)
        w = (z / (1 + torch.exp(-z))).unflatten(-1, (G, D))
        w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        beta = 2 / (1 + torch.exp(-(x @ scheme.strength.mT + scheme.strength_bias)))  # (t, G)
        eye = torch.eye(D, dtype=torch.float64)
        rows = []
        for h in range(H):
            g = h // (H // G)
            for n in range(len(x)):
                product = eye
                row = [torch.zeros((), dtype=torch.float64)] * len(x)
                for m in range(n, -1, -1):
                    row[m] = q[h, n] @ product @ k[h, m] / math.sqrt(D)
                    product = product @ (eye - beta[m, g] * torch.outer(w[m, g], w[m, g]))
                rows.append(torch.stack(row))
        return torch.stack(rows).unflatten(0, (H, len(x)))

    return logits_of


@pytest.mark.parametrize("window", [None, 4])
@layouts
def test_path_multiplies_the_reflections_between_query_and_key(layout, window, monkeypatch):
    """Values and gradients, with every query at once, and with few queries and keys to a block and
    chunk."""
    scheme = scheme_of("path")
    positions = LAYOUTS[layout]
    expected = real(positions, by_documents(positions, reflected(scheme), window))
    slow = torch.autograd.grad(expected.square().sum(), list(scheme.parameters()))
    for kernel, queries, keys in (
        ("dense", 256, 128),
        ("auto", 256, 128),
        ("auto", 4, 3),
        ("auto", 3, 128),
    ):
        monkeypatch.setattr("model.attention.explicit.QUERY_BLOCK", queries)
        monkeypatch.setattr("model.position.schemes.path.CHUNK", keys)
        found = real(positions, output_of(scheme, positions, kernel, window))
        close(found, expected, atol=1e-11)
        fast = torch.autograd.grad(found.square().sum(), list(scheme.parameters()))
        for a, b in zip(fast, slow, strict=True):
            assert b.abs().max() > 1e-3
            close(a, b, atol=1e-9)


@torch.no_grad()
def test_path_without_strength_is_nope():
    scheme = scheme_of("path")
    scheme.strength.zero_()
    scheme.strength_bias.fill_(-1e4)  # β = 0
    for layout in LAYOUTS.values():
        plain = output_of(scheme_of("none"), layout, "auto")
        close(real(layout, output_of(scheme, layout, "auto")), real(layout, plain), atol=1e-12)


def angles_of_selective_rope(scheme: PositionalScheme, theta: float):
    def logits_of(x, q, k):
        z = convolved(x, scheme.down, scheme.up, scheme.conv).unflatten(-1, (G, D // 2))
        angle = []
        total = torch.zeros(G, D // 2, dtype=torch.float64)
        for added in z:
            total = total + added
            angle.append(total * doubles([theta ** (-2 * n / D) for n in range(D // 2)]))
        return turned(q, k, torch.stack(angle, 1).repeat_interleave(H // G, 0))

    return logits_of


def angles_of_carope(scheme: PositionalScheme):
    def logits_of(x, q, k):
        angle = torch.zeros(H, len(x), D // 2, dtype=torch.float64)
        for h, n, i in itertools.product(range(H), range(len(x)), range(D // 2)):
            for t in range(n + 1):
                g = h // (H // G)
                z = float(scheme.weight[g] @ x[t]) + (
                    0.0 if scheme.bias is None else float(scheme.bias[g])
                )
                angle[h, n, i] += (1 / (math.log(1 + math.exp(z)) + 1)) ** i
        return turned(q, k, angle)

    return logits_of


@layouts
@torch.no_grad()
def test_selective_rope_rotates_by_cumulative_convolved_projections(layout):
    scheme = scheme_of("selective_rope", theta=900.0, rank=5)
    positions = LAYOUTS[layout]
    expected = by_documents(positions, angles_of_selective_rope(scheme, 900.0))
    for kernel in ("auto", "dense"):
        close(
            real(positions, output_of(scheme, positions, kernel)),
            real(positions, expected),
            atol=1e-11,
        )


@pytest.mark.parametrize("start", ["rope", "paper"])
@layouts
@torch.no_grad()
def test_carope_rotates_by_powers_of_each_tokens_base(layout, start):
    scheme = scheme_of("carope", start=start)
    positions = LAYOUTS[layout]
    expected = by_documents(positions, angles_of_carope(scheme))
    close(
        real(positions, output_of(scheme, positions, "auto")), real(positions, expected), atol=1e-11
    )


@torch.no_grad()
def test_carope_equals_rope_at_initialization_and_for_equal_f():
    theta = 700.0
    tokens = ids(2, S)
    positions = TokenPositions.plain(S)
    carope = (
        Transformer(settings_of({"name": "carope", "theta": theta}), V, S).initialize(4).double()
    )
    rope = Transformer(settings_of({"name": "rope", "theta": theta}), V, S).initialize(4).double()
    expected = rope(tokens, positions)
    close(carope(tokens, positions), expected, atol=1e-5)  # b is a float32 number
    for scheme in carope.position.values():
        features = carope.settings.head_dim
        scheme.bias.fill_(math.log(math.exp(theta ** (2 / features) - 1) - 1))
    close(carope(tokens, positions), expected, atol=1e-10)
    moved = (
        Transformer(settings_of({"name": "carope", "start": "paper"}), V, S).initialize(4).double()
    )
    assert (moved(tokens, positions) - expected).abs().max() > 1e-3


def test_cumulative_angles_are_accurate_at_large_positions():
    """CARoPE's first pair turns by exactly one radian a token, in float32 and after 60,000 tokens
    too."""
    count = 60_000
    (settings, kind) = SCHEMES["carope"]
    scheme = kind(settings(), HeadGeometry(C, 1, D, S, S, 1))
    positions = TokenPositions.plain(count)
    scheme.initialize(torch.Generator().manual_seed(0), 1.0)
    with torch.no_grad():
        context = AttentionContext(positions, positions, positions, 1, 1, torch.device("cpu"))
        angles = extras_of(scheme.plan(context), normal(1, count, C).float())
    assert angles.dtype == torch.float32
    for n in (0, 9, count - 1):
        assert math.cos(float(angles[0, n, 0])) == pytest.approx(math.cos(n + 1), abs=1e-6)
