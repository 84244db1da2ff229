"""Linear attention against its definition, with gradients, in every precision; invalid settings."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from model import ModelError, TokenPositions
from model.mixers.linear import positive
from tests.model.linear import (
    by_definition,
    every_form,
    inputs,
    linear,
    mixed,
    projected,
    recurrent,
)
from tests.model.zoo import C, D, G, build, close, ids, packed


@every_form
@pytest.mark.parametrize("chunk", [1, 3, 64])
@torch.no_grad()
def test_chunked_recurrent_and_quadratic_forms_agree(form, chunk):
    model = linear("rope", form, chunk)
    x = inputs(2, 11)
    offset = 37
    out = mixed(model, x, TokenPositions.plain(11, offset=offset))
    for b, h in ((0, 0), (0, 3), (1, 5)):
        q, k, v = projected(model, x, b, h)
        positions = [offset + n for n in range(11)]
        expected = torch.tensor(by_definition(q, k, v, positions, form), dtype=torch.float64)
        close(out[b, h], expected)
        close(torch.tensor(recurrent(q, k, v, positions, form), dtype=torch.float64), expected)


@given(st.integers(0, 10_000), st.integers(0, 50_000), st.integers(0, 50_000))
@torch.no_grad()
def test_cosine_weights_are_nonnegative(seed, n, m):
    """Outputs are means: of values in [2, 3] they stay there, whatever queries, keys and
    positions."""
    model = linear("rope", "cosine", seed=seed % 7)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, C, dtype=torch.float64, generator=generator) * 30
    attention = model.layers[0].attention
    attention.values = lambda x: (
        (2 + torch.tensor([0.0, 1.0])[None, None, :, None]).expand(1, G, 2, D).double()
    )
    order = torch.arange(2)[None]
    positions = TokenPositions(
        order, torch.tensor([[m, n]]), 0 * order, "plain", max(n, m) + 1, (2,), False
    )
    out = mixed(model, x, positions)
    assert (out >= 2 - 1e-12).all() and (out <= 3 + 1e-12).all()


@torch.no_grad()
def test_feature_map_is_elu_plus_one_without_underflow():
    x = torch.linspace(-40, 9, 99, dtype=torch.float64)
    expected = torch.tensor(
        [a + 1 if a > 0 else math.exp(a) for a in x.tolist()], dtype=torch.float64
    )
    ours = positive(x.float())
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(positive(x), torch.nn.functional.elu(x) + 1, rtol=0, atol=1e-12)


@every_form
@torch.no_grad()
def test_sums_stay_float32_under_autocast(form):
    """bfloat16 has 8 bits: a sum over 300 tokens in it would stop growing. Projections alone are
    rounded."""
    model = linear("rope", form, dtype=torch.float32)
    tokens = ids(2, 300)
    exact = model(tokens, TokenPositions.plain(300))
    cache = model.make_cache(2, 300, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [
            model(tokens[:, s : s + 100], TokenPositions.plain(100, offset=s), cache=cache)
            for s in (0, 100, 200)
        ]
    assert all(layer.last.memory.dtype == torch.float32 for layer in cache.layers)
    assert (torch.cat(parts, 1) - exact).abs().mean() < 0.05


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_form
@pytest.mark.usefixtures("_fresh_dynamo")
def test_training_steps_are_one_graph(form):
    nets = [linear("rope", form, 4, layers=1).train() for _ in range(2)]
    counter = CompileCounter()
    nets[0].compile(fullgraph=True, backend=counter)
    for n, cuts in enumerate(([[4, 7], [6, 5]], [[1, 10], [11]], [[5, 3, 3], [2, 9]])):
        for positions, graphs in ((TokenPositions.plain(11), 1), (packed(cuts, length=11), 3)):
            tokens = ids(2, 11, seed=n)
            losses = []
            for net in nets:
                net.zero_grad()
                loss = net(tokens, positions, targets=tokens.roll(1, 1)).mean()
                loss.backward()
                losses.append(float(loss.detach()))
            assert losses[0] == pytest.approx(losses[1], abs=1e-10)
            for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                close(a.grad, b.grad, atol=1e-9)
            assert counter.frame_count <= graphs or n > 0
    # One for plain, one for packed and at most one more, when the largest position becomes dynamic.
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("position", "words"),
    [
        ({"name": "rope", "window": 5}, ["model.position.window", "null"]),
        ({"name": "none", "sink_logit": "learned"}, ["model.position.sink_logit", "none"]),
        ({"name": "none", "sink_logit": "zero"}, ["model.position.sink_logit", "none"]),
        (
            {"name": "rope", "temperature": {"name": "log_n"}},
            ["model.position.temperature", "{name: none}"],
        ),
        ({"name": "alibi"}, ["model.position", "'alibi' adds a bias"]),
        (
            {"name": "rope", "remap": {"name": "rerope"}},
            ["model.position", "'rope'", "by distance"],
        ),
        (
            {
                "name": "pattern",
                "layers": ["a", "b"],
                "kinds": {"a": {"name": "rope"}, "b": {"name": "alibi"}},
            },
            ["model.kinds.b.position", "'alibi' adds a bias"],
        ),
        (
            {"name": "pattern", "layers": ["a"], "kinds": {"a": {"name": "none", "window": 3}}},
            ["model.kinds.a.position.window"],
        ),
    ],
)
def test_softmax_options_are_rejected(position, words):
    with pytest.raises(ModelError) as caught:
        linear(position, "numerator")
    for word in [*words, "mixer.name = attention"]:
        assert word in str(caught.value)
    build(position)  # softmax attention takes it
