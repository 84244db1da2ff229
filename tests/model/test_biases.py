"""Distance biases and FIRE against transformers, independent formulas and the papers' listings."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.t5.modeling_t5 import T5Attention

from model import TokenPositions
from tests.model.alone import (
    L0,
    attended,
    bias_of,
    by_head,
    distances,
    doubles,
    drawn,
    normal,
    pairs_of,
    put,
    scheme_of,
    weighted,
)
from tests.model.zoo import H, T, build, close, ids


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 16, 20])
@pytest.mark.parametrize("stretch", [1.0, 2.5])
def test_alibi_matches_huggingface_with_stretched_distances(heads, stretch):
    bias = bias_of(scheme_of("alibi", heads=heads, stretch=stretch), 9)[0]
    slopes = _get_alibi_slopes(heads, "cpu").double()[:, None, None]
    close(bias, -slopes * distances(range(9)) / stretch, atol=1e-6)


@pytest.mark.parametrize(
    ("queries", "past"),
    [
        (9, 0),
        (4, 30),
        (1, 200),
    ],
)
def test_t5_biases_match_huggingface(queries, past):
    config = T5Config(d_model=28, d_kv=10, num_heads=6, is_decoder=True)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    scheme = put(scheme_of("t5"), weight=theirs.relative_attention_bias.weight.detach())
    keys = past + queries
    new = TokenPositions.plain(queries, offset=past)
    pairs = pairs_of(scheme, new, TokenPositions.plain(keys))
    bias = pairs.bias(*pairs.indices(0, queries, slice(0, keys)))
    expected = theirs.compute_bias(queries, keys, past_seen_tokens=past)
    close(bias, expected.detach(), atol=0)  # keys ahead have the bias of distance 0 in both


KERPLE = {
    "log": lambda d, r1, r2, r3: -r1 * math.log(1 + r2 * d),
    "power": lambda d, r1, r2, r3: -r1 * d**r2,
    "log3": lambda d, r1, r2, r3: -r1 * math.log(1 + r2 * d**r3),
}


@given(
    form=st.sampled_from([*KERPLE]),
    heads=st.integers(1, 7),
    offset=st.integers(0, 300),
    stretch=st.floats(1, 9),
    seed=st.integers(0, 99),
)
def test_kerple_matches_formula(form, heads, offset, stretch, seed):
    scheme = scheme_of("kerple", heads=heads, form=form, stretch=stretch)
    r = 0.02 + 1.9 * normal(3, heads, seed=seed).sigmoid()
    put(scheme, **{name: r[int(name[1]) - 1] for name, _ in scheme.named_parameters()})
    bias = bias_of(scheme, TokenPositions.plain(6, offset=offset))[0]
    for h, i, j in itertools.product(range(heads), range(6), range(6)):
        expected = KERPLE[form](max(i - j, 0) / stretch, *r[:, h].tolist())
        assert float(bias[h, i, j]) == pytest.approx(expected, abs=1e-11)


def test_kerple_parameters_are_clamped_and_receive_gradients():
    model = build("kerple-power", layers=1)
    scheme = model.position["all"]
    put(scheme, r1=[-3.0, 0.5, 0.5, 0.5, 0.5, 0.5], r2=[1.0, 5.0, -1.0, 1.0, 1.0, 1.0])
    r1 = scheme.get_parameter("r1")
    r2 = scheme.get_parameter("r2")
    tokens = ids(2, T)
    with torch.no_grad():
        before = model(tokens)
    assert r1[0] == -3
    assert r2[1] == 5  # evaluation does not change parameters
    model.train()(tokens, targets=tokens.flip(1)).mean().backward()
    assert r1[:2].tolist() == pytest.approx([0.01, 0.5], rel=1e-6)
    assert r2[1:3].tolist() == pytest.approx([2.0, 0.01], rel=1e-6)
    assert (r1.grad.abs() > 1e-9).all()
    assert (r2.grad.abs() > 1e-9).all()
    with torch.no_grad():
        close(model.eval()(tokens), before, atol=1e-12)


@given(
    heads=st.integers(1, 9),
    dims=st.integers(1, 40).map(lambda n: 2 * n),
    offset=st.integers(0, 3000),
    stretch=st.sampled_from([1.0, 1.0, 3.5]),
    step=st.sampled_from([1, 0.5]),
)
def test_sandwich_matches_formula(heads, dims, offset, stretch, step):
    scheme = scheme_of("sandwich", heads=heads, dims=dims, stretch=stretch)
    positions = TokenPositions.plain(4, offset=offset)
    if step != 1:  # distances that are no row of the table
        positions = replace(positions, position=positions.position * step, unit_steps=False)
    angles = distances(range(4))[..., None] * step / stretch
    frequencies = 10_000 ** (-doubles(range(0, dims, 2)) / dims)
    waves = (angles * frequencies).cos().sum(-1).tril()
    factors = heads / (8 * doubles(range(1, heads + 1)))
    close(bias_of(scheme, positions)[0], factors[:, None, None] * waves, atol=1e-10)


class FireByTheListing(nn.Module):
    """The appendix of Li et al. 2023, typed anew: the whole (H, T, T) at once."""

    def __init__(self, heads: int, width: int, c: float, multiplier: float, length: float):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, heads))
        self.c = c
        self.threshold = abs(multiplier * length)

    def forward(self, tokens: int) -> torch.Tensor:
        positions = torch.arange(tokens, dtype=torch.float64)
        rel = positions[:, None] - positions[None, :]
        normalizer = torch.maximum(positions, doubles(self.threshold))[:, None]
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
@torch.no_grad()
def test_fire_matches_reference_implementation(heads, width, c, multiplier, tokens, seed):
    torch.manual_seed(seed)
    listing = FireByTheListing(heads, width, c, multiplier, 11.0).double()
    inner, _, outer = listing.mlp
    scheme = scheme_of("fire", heads=heads, width=width, init_length=11.0)
    scheme.inner.load_state_dict(inner.state_dict())
    put(scheme, c=[c], multiplier=[multiplier], **{"outer.weight": outer.weight})
    # The bias of the last layer is one number for each head's logits, which the softmax cancels.
    expected = listing(tokens) - outer.bias[:, None, None]
    close(bias_of(scheme, tokens)[0], expected.tril(), atol=1e-11)


@pytest.mark.parametrize("width", [1, 5, 8])
def test_fire_segments_equal_the_network(width):
    """The piecewise linear form for FlexAttention, and its gradients; one unit is constant."""
    scheme = scheme_of("fire", heads=3, width=width)
    inner = torch.linspace(1, 2, width) * (-1) ** torch.arange(width)
    offset = -inner * torch.linspace(-2, 2, width)
    if width > 1:
        inner[-1] = 0.0
        offset[-1] = 0.25
    put(scheme, **{"inner.weight": inner[:, None].tolist(), "inner.bias": offset.tolist()})
    x = torch.linspace(-3, 3, 400, dtype=torch.float64)
    network = scheme.network(x[None, None, None], torch.arange(3))[0, :, 0]
    edges, intercept, slope = scheme.segments()
    s = (edges[:, None] <= x).sum(0)
    lines = intercept[:, s] + slope[:, s] * x
    assert len(s.unique()) == width + (width == 1)
    close(lines, network, atol=1e-13)
    factor = normal(*network.shape)
    weights = [scheme.get_parameter(n) for n in ("inner.weight", "inner.bias", "outer.weight")]
    expected = torch.autograd.grad((network * factor).sum(), weights)
    found = torch.autograd.grad((lines * factor).sum(), weights)
    for a, b in zip(found, expected, strict=True):
        close(a, b, atol=1e-11)


@torch.no_grad()
def test_t5_without_scale_uses_unscaled_dot_products():
    q, k, v = drawn(5)
    scheme = scheme_of("t5", unscaled=True)
    bias = scheme.weight[distances(range(5)).long()].permute(2, 0, 1)  # distances 0 to 4
    ours = attended(scheme, TokenPositions.plain(5), q, k, v)
    close(ours, weighted(q @ by_head(k).mT + bias, v), atol=1e-12)


# Settings, parameters of head 0, and its bias. Of 6 heads, the first 4 have ALiBi's slopes of 4.
STRETCHED = {
    "alibi": ({}, {}, lambda d: -d / 4),
    "sandwich": ({"dims": 4}, {}, lambda d: 6 / 8 * (math.cos(d) + math.cos(d / 100))),
    "kerple": ({}, {"r1": 1.5, "r2": 0.3}, lambda d: -1.5 * math.log(1 + 0.3 * d)),
}


@pytest.mark.parametrize("name", STRETCHED)
def test_stretches_follow_the_declared_length_of_each_row(name):
    """The original length, and one beyond, at the last token."""
    keys, parameters, expected = STRETCHED[name]
    values = {key: torch.full((H,), value) for key, value in parameters.items()}
    rows = replace(TokenPositions.plain(L0), lengths=(L0, 57))
    bias = bias_of(put(scheme_of(name, stretch="auto", **keys), **values), rows, rows=2)
    for row, length in enumerate(rows.lengths):
        found = bias[row, 0, -1, 0].item()
        assert found == pytest.approx(expected((L0 - 1) * L0 / length), abs=1e-6)
