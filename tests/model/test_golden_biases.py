"""KERPLE, Sandwich and FIRE against independent float64 formulas and hand-computed cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from model import TokenPositions
from model.position import AttentionContext
from tests.model.pairwise import bias_of, put, scheme_of
from tests.model.zoo import T, build, close, ids

# KERPLE


@given(
    form=st.sampled_from(["log", "power", "log3"]),
    heads=st.integers(1, 7),
    offset=st.integers(0, 300),
    stretch=st.floats(1, 9),
    seed=st.integers(0, 99),
)
def test_kerple_matches_formula(form, heads, offset, stretch, seed):
    scheme = scheme_of("kerple", heads, form=form, stretch=stretch)
    generator = torch.Generator().manual_seed(seed)
    r = [0.02 + 1.9 * torch.rand(heads, generator=generator, dtype=torch.float64) for _ in range(3)]
    put(scheme, **{name: r[int(name[1]) - 1] for name, _ in scheme.named_parameters()})
    found = bias_of(scheme, TokenPositions.plain(6, offset=offset))[0]
    for h in range(heads):
        r1, r2, r3 = (float(x[h]) for x in r)
        for i in range(6):
            for j in range(i + 1):
                d = (i - j) / stretch
                expected = {
                    "log": -r1 * math.log(1 + r2 * d),
                    "power": -r1 * d**r2,
                    "log3": -r1 * math.log(1 + r2 * d**r3),
                }[form]
                assert float(found[h, i, j]) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kerple_parameters_are_clamped_and_receive_gradients(dtype):
    model = build("kerple-power", dtype=dtype, layers=1)
    scheme = model.position["all"]
    put(scheme, r1=[-3.0, 0.5, 0.5, 0.5, 0.5, 0.5], r2=[1.0, 5.0, -1.0, 1.0, 1.0, 1.0])
    kept = {name: p.clone() for name, p in scheme.named_parameters()}
    tokens = ids(2, T)
    with torch.no_grad():
        before = model(tokens, TokenPositions.plain(T))
    for name, p in scheme.named_parameters():
        assert torch.equal(p, kept[name])  # reading a model does not change it
    model.train()(tokens, TokenPositions.plain(T), targets=tokens.flip(1)).mean().backward()
    r1 = scheme.get_parameter("r1")
    r2 = scheme.get_parameter("r2")
    assert float(r1[0].detach()) == pytest.approx(0.01, rel=1e-6) and float(r1[1].detach()) == 0.5
    assert float(r2[1].detach()) == 2.0 and float(r2[2].detach()) == pytest.approx(0.01, rel=1e-6)
    assert (r1.grad.abs() > 1e-9).all() and (r2.grad.abs() > 1e-9).all()
    with torch.no_grad():
        close(model.eval()(tokens, TokenPositions.plain(T)), before, atol=1e-12)  # as it was read


# Sandwich


@given(
    heads=st.integers(1, 9),
    dims=st.integers(1, 40).map(lambda n: 2 * n),
    offset=st.integers(0, 3000),
    stretch=st.sampled_from([1.0, 1.0, 3.5]),
    halves=st.booleans(),
)
def test_sandwich_matches_formula(heads, dims, offset, stretch, halves):
    scheme = scheme_of("sandwich", heads, dims=dims, stretch=stretch)
    positions = TokenPositions.plain(4, offset=offset)
    if halves:  # distances that are no row of the table
        positions = replace(positions, position=positions.position / 2, unit_steps=False)
    found = bias_of(scheme, positions)[0]
    for h in range(heads):
        for i in range(4):
            for j in range(i + 1):
                d = (i - j) / stretch / (2 if halves else 1)
                total = math.fsum(math.cos(d * 10000 ** (-2 * k / dims)) for k in range(dims // 2))
                assert float(found[h, i, j]) == pytest.approx(
                    total * heads / (8 * (h + 1)), abs=1e-10
                )


def test_sandwich_is_accurate_at_large_distances_in_float32():
    """Angles in float32 would be wrong by 1e-2 radians at 300,000."""
    scheme = scheme_of("sandwich", 1, dims=4)
    far = 300_000
    positions = TokenPositions.plain(1, offset=far)
    context = AttentionContext(
        positions, positions, TokenPositions.plain(far + 1), 1, 1, torch.device("cpu")
    )
    context = replace(context, tables=scheme.tables(positions, torch.float32))
    h = torch.tensor([0])
    d = torch.tensor([far])
    found = scheme.bias(context)(h, h, d)
    expected = (math.cos(far) + math.cos(far / 100)) / 8
    assert float(found) == pytest.approx(expected, abs=1e-6)


# FIRE


class FireByTheListing(nn.Module):
    """The appendix of Li et al. 2023, typed anew: the whole (H, T, T) at once."""

    def __init__(self, heads: int, width: int, c: float, multiplier: float, length: float):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, heads))
        self.c = c
        self.multiplier = multiplier
        self.length = length

    def forward(self, tokens: int) -> torch.Tensor:
        positions = torch.arange(tokens, dtype=torch.float64)
        rel = positions[:, None] - positions[None, :]
        threshold = abs(self.multiplier * self.length)
        normalizer = torch.maximum(positions, torch.tensor(threshold, dtype=torch.float64))[:, None]
        rel = torch.log(torch.abs(self.c * rel) + 1)
        normalizer = torch.log(torch.abs(self.c * normalizer) + 1) + 1e-6
        return self.mlp((rel / normalizer)[..., None]).permute(2, 0, 1)


@given(
    heads=st.integers(1, 7),
    width=st.integers(1, 9),
    c=st.floats(-1, 1).filter(lambda c: abs(c) > 1e-2),
    multiplier=st.floats(-2, 2),
    tokens=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_fire_matches_reference_implementation(heads, width, c, multiplier, tokens, seed):
    torch.manual_seed(seed)
    listing = FireByTheListing(heads, width, c, multiplier, 11.0).double()
    scheme = scheme_of("fire", heads, width=width, init_length=11.0)
    put(scheme, c=[c], multiplier=[multiplier])
    inner = listing.mlp[0]
    last = listing.mlp[2]
    put(
        scheme,
        **{"inner.weight": inner.weight, "inner.bias": inner.bias, "outer.weight": last.weight},
    )
    # one number for each head's logits: not learned
    expected = listing(tokens) - last.bias[:, None, None]
    with torch.no_grad():
        close(bias_of(scheme, tokens)[0], expected.tril(), atol=1e-11)


@pytest.mark.parametrize("width", [1, 5, 8])
def test_fire_segments_equal_the_network(width):
    """The piecewise linear form for FlexAttention, and its gradients; one unit is constant."""
    scheme = scheme_of("fire", 3, width=width)
    inner = torch.linspace(1, 2, width) * (-1) ** torch.arange(width)
    offset = -inner * torch.linspace(-2, 2, width)
    if width > 1:
        inner[-1], offset[-1] = 0.0, 0.25
    put(scheme, **{"inner.weight": inner[:, None].tolist(), "inner.bias": offset.tolist()})
    x = torch.linspace(-3, 3, 400, dtype=torch.float64)
    network = scheme.network(x[None, None, None], torch.arange(3))[0, :, 0]
    edges, intercept, slope = scheme.segments()
    s = (edges[:, None] <= x).sum(0)
    lines = intercept[:, s] + slope[:, s] * x
    assert len(s.unique()) == width + (width == 1)
    close(lines, network, atol=1e-13)
    upstream = torch.randn(network.shape, dtype=torch.float64)
    weights = [scheme.get_parameter(n) for n in ("inner.weight", "inner.bias", "outer.weight")]
    for a, b in zip(
        torch.autograd.grad((network * upstream).sum(), weights),
        torch.autograd.grad((lines * upstream).sum(), weights),
        strict=True,
    ):
        close(a, b, atol=1e-11)


def test_fire_fixed_threshold_gives_learned_one_zero_gradient():
    model = build({"name": "fire", "threshold": 5.0}).train()
    model(ids(2, T), TokenPositions.plain(T), targets=ids(2, T).flip(1)).mean().backward()
    for name, p in model.named_parameters():
        assert p.requires_grad and p.grad is not None, name
        if name.endswith("multiplier"):
            assert (p.grad == 0).all()
