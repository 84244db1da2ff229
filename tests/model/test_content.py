"""Content-dependent schemes: forget gates against their formula pair by pair, and common
properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from model import (
    SCHEMES,
    TokenPositions,
)
from model.position import AttentionContext, HeadGeometry
from model.position.schemes.alibi import alibi_slopes
from tests.model.alone import doubles
from tests.model.spelled import (
    LAYOUTS,
    C,
    D,
    S,
    by_documents,
    context_of,
    extras_of,
    layouts,
    normal,
    output_of,
    real,
    scheme_of,
    tensors,
    turned,
)
from tests.model.zoo import H, build, cached, close, ids

TURNING = ("selective_rope", "carope")
ALL = ("fox", "path", *TURNING)


def forgetting(weight: torch.Tensor, bias: torch.Tensor):
    def logits_of(x, q, k):
        out = torch.einsum("htd,hsd->hts", q, k) / math.sqrt(D)
        for h in range(H):
            z = [float(weight[h] @ token + bias[h]) for token in x]
            gates = [1 / (1 + math.exp(-y)) for y in z]
            for n in range(len(x)):
                for m in range(n):
                    out[h, n, m] += math.log(math.prod(gates[m + 1 : n + 1]))
        return out

    return logits_of


@layouts
@torch.no_grad()
def test_forget_gates_multiply_between_key_and_query(layout):
    scheme = scheme_of("fox")
    positions = LAYOUTS[layout]
    expected = by_documents(positions, forgetting(scheme.weight, scheme.bias))
    for kernel in ("auto", "dense", "explicit"):
        close(
            real(positions, output_of(scheme, positions, kernel)),
            real(positions, expected),
            atol=1e-12,
        )


@torch.no_grad()
def test_forget_gate_excludes_own_token():
    scheme = scheme_of("fox")
    plan = scheme.plan(context_of(scheme, LAYOUTS["plain"])).bind(tensors()[0], None)
    (view,) = plan.read(*tensors()[1:3])
    i = torch.arange(S)
    heads = torch.arange(H)[:, None]
    assert (view.mask.bias(torch.tensor(0), heads, i, i) == 0).all()
    assert (view.mask.bias(torch.tensor(0), heads, i[1:], i[:-1]) < -1e-3).all()


@layouts
@torch.no_grad()
def test_constant_gate_equals_alibi(layout):
    scheme = scheme_of("fox", gate="constant")
    positions = LAYOUTS[layout]
    slopes = doubles([-math.log(1 / (1 + math.exp(-float(b)))) for b in scheme.bias])

    def logits_of(x, q, k):
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))
        return torch.einsum("htd,hsd->hts", q, k) / math.sqrt(D) - slopes[:, None, None] * back

    expected = by_documents(positions, logits_of, window=6)
    close(
        real(positions, output_of(scheme, positions, "auto", 6)),
        real(positions, expected),
        atol=1e-12,
    )


@torch.no_grad()
def test_forget_gates_combine_with_rotation():
    """A gate that never learned beside RoPE is ALiBi's slopes beside RoPE."""
    theta = 50.0
    scheme = scheme_of("fox", gate="fixed", rotary=True, theta=theta)
    positions = LAYOUTS["packed"]
    spectrum = doubles([theta ** (-2 * n / D) for n in range(D // 2)])

    def logits_of(x, q, k):
        angle = torch.arange(len(x))[:, None] * spectrum
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))
        return turned(q, k, angle.expand(H, -1, -1)) - alibi_slopes(H)[:, None, None] * back

    expected = by_documents(positions, logits_of)
    close(
        real(positions, output_of(scheme, positions, "auto")), real(positions, expected), atol=1e-12
    )


def test_long_gate_sums_resolve_adjacent_tokens():
    """Float32 gates; the exact sum of those between two tokens, near and far, whole and in two
    pieces."""
    count = 50_000
    geometry = HeadGeometry(C, H, D, S, S, H)
    settings, kind = SCHEMES["fox"]
    scheme = kind(settings(), geometry)
    scheme.initialize(torch.Generator().manual_seed(0), 1.0)
    x = normal(1, count, C, seed=1).float()
    positions = TokenPositions.plain(count)
    tables = scheme.tables(positions, torch.float32)
    context = AttentionContext(positions, positions, positions, 1, H, x.device, tables)
    with torch.no_grad():
        plan = scheme.plan(context)
        extras = extras_of(plan, x)
        half = count // 2
        second = extras_of(plan, x[:, half:], extras[:, :half])
        close(second, extras[:, half:], atol=1e-9)
        q = torch.zeros(1, H, count, D)
        bias = scheme.read(q, q, extras, plan)[0].mask.bias
        gates = F.logsigmoid(F.linear(x[0], scheme.weight, scheme.bias))
        naive = gates.cumsum(0)
    assert bias(*map(torch.tensor, (0, 0, 9, 8))).dtype == torch.float32
    worst = 0.0
    for n, d, h in itertools.product((count - 1, count - 777), (1, 3, 50), (0, H - 1)):
        exact = math.fsum(gates[n - d + 1 : n + 1, h].tolist())
        found = float(bias(*map(torch.tensor, (0, h, n, n - d))))
        assert found == pytest.approx(exact, rel=1e-6)
        worst = max(worst, abs(float(naive[n, h] - naive[n - d, h]) - exact))
    assert worst > 1e-3  # what sums in float32 would give


@pytest.mark.parametrize("name", ["fox", *TURNING])
@torch.no_grad()
def test_sinks_keep_cumulative_state_after_eviction(name):
    model = build({"name": name, "window": 4, "sinks": 2})
    tokens = ids(2, 19)
    whole = model(tokens, TokenPositions.plain(19))
    close(cached(model, tokens, [1] * 19), whole)
    close(cached(model, tokens, [5, 1, 9, 1, 1, 2]), whole)
    counts = [9, 6]
    alone = model(tokens[1:, 3:], TokenPositions.plain(16))
    cache = model.make_cache(2, 19)
    parts = [model(tokens[:, :9], TokenPositions.left_padded(counts, 9), cache=cache)]
    for n in range(9, 19):
        parts.append(
            model(
                tokens[:, n : n + 1], TokenPositions.left_padded(counts, 1, offset=n), cache=cache
            )
        )
    out = torch.cat(parts, dim=1)
    close(out[0], whole[0])
    close(out[1, 3:], alone[0])


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_cache_extras_stay_float32_under_autocast(name):
    model = build(name, dtype=torch.float32)
    (scheme, *_), x = model.position.values(), normal(1, 19, 28).float()
    positions = TokenPositions.plain(19)
    plan = scheme.plan(
        AttentionContext(
            positions, positions, positions, 1, 6, x.device, scheme.tables(positions, torch.float32)
        )
    )
    exact = extras_of(plan, x)
    with torch.autocast("cpu", torch.bfloat16):
        close(extras_of(plan, x), exact, atol=0)
    assert exact.dtype == (torch.float64 if name == "fox" else torch.float32)
