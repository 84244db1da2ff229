"""Content-dependent schemes: forget gates against their formula pair by pair, and common properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from model import (
    SCHEMES,
    ModelError,
    ModelSettings,
    TokenPositions,
    Transformer,
    check_override,
)
from model.position import AttentionContext, HeadGeometry
from model.position.content import causal_convolution, running_sum, series_of
from model.position.schemes.alibi import alibi_slopes
from tests.model.alone import doubles
from tests.model.spelled import (
    LAYOUTS,
    B,
    C,
    D,
    S,
    by_documents,
    context_of,
    documents,
    layouts,
    normal,
    output_of,
    real,
    scheme_of,
    tensors,
    turned,
)
from tests.model.zoo import H, V, build, cached, close, ids, packed, settings_of

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


@pytest.mark.parametrize("gate", ["fixed", "constant"])
@torch.no_grad()
def test_initial_gates_equal_alibi(gate):
    settings = settings_of({"name": "fox", "gate": gate})
    fox = Transformer(settings, V, S).initialize(4).double()
    alibi = Transformer(settings_of({"name": "alibi"}), V, S).initialize(4).double()
    assert len(list(fox.parameters())) - len(list(alibi.parameters())) == (
        3 if gate == "constant" else 0
    )
    tokens = ids(2, S)
    atol = 1e-10 if gate == "fixed" else 1e-5  # β is a float32 number
    close(fox(tokens, TokenPositions.plain(S)), alibi(tokens, TokenPositions.plain(S)), atol=atol)


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
    """Float32 gates; the exact sum of those between two tokens, near and far, whole and in two pieces."""
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
        extras = plan.compute_extras(x, None)
        half = count // 2
        second = plan.compute_extras(x[:, half:], extras[:, :half])
        close(second, extras[:, half:], atol=1e-9)
        q = torch.zeros(1, H, count, D)
        bias = plan.read(q, q, extras)[0].mask.bias
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


@torch.no_grad()
def test_packed_convolutions_and_sums_are_bit_exact():
    x = normal(B, S, 6)
    weight = normal(6, 4, seed=1)
    positions = LAYOUTS["packed"]
    out = causal_convolution(series_of(x, None, 4)[0], weight, positions.order)
    total = running_sum(x, None, positions)
    # In two passes, the second at the start of row 0's second document and within one of row 1's.
    later = running_sum(x[:, 5:], total[:, 4], positions.last(S - 5))
    close(later[0], total[0, 5:], atol=0)
    close(later[1], total[1, 5:], atol=1e-12)
    for b, start, stop in documents(positions):
        piece = x[b : b + 1, start:stop]
        alone = packed([[stop - start]])
        close(
            out[b : b + 1, start:stop],
            causal_convolution(series_of(piece, None, 4)[0], weight, alone.order),
            atol=0,
        )
        close(total[b : b + 1, start:stop], running_sum(piece, None, alone), atol=0)
        close(total[b, stop - 1], piece[0].sum(0), atol=1e-12)
        close(out[b, start], x[b, start] * weight[:, 0], atol=0)


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
@pytest.mark.parametrize("window", [1, 2])
@torch.no_grad()
def test_windows_shorter_than_the_convolution(name, window):
    model = build({"name": name, "window": window})
    tokens = ids(2, 11)
    close(cached(model, tokens, [1] * 11), model(tokens, TokenPositions.plain(11)))


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
    exact = plan.compute_extras(x, None)
    with torch.autocast("cpu", torch.bfloat16):
        close(plan.compute_extras(x, None), exact, atol=0)
    assert exact.dtype == (torch.float64 if name == "fox" else torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_projections_are_per_layer(name):
    model = Transformer(settings_of({"name": name}), V, S).initialize(1)
    assert len(model.position) == model.settings.layers == 3
    (a, b, _), drawn = model.position.values(), 0
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.isfinite(p).all()
        drawn += bool((p != q).any())
    assert drawn or name == "carope"  # which starts as RoPE in every layer
    again = Transformer(settings_of({"name": name}), V, S).initialize(1)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        close(p, q, atol=0)


def refusal(error, call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_invalid_combinations_suggest_a_fix():
    for name in ("fox", *TURNING):
        keys = {"name": name, "window": 1, "sinks": 2}
        assert "window of 2 or more" in refusal(
            ValidationError, lambda keys=keys: ModelSettings(position=keys)
        )
    far = {"name": "path", "window": 9, "sinks": 2}
    assert "set sinks to 0" in refusal(ValidationError, lambda: ModelSettings(position=far))
    for keys in ({"name": "selective_rope"}, {"name": "carope"}, {"name": "fox", "rotary": True}):
        shape = ModelSettings(dim=45, heads=3, position=keys)
        text = refusal(ModelError, lambda shape=shape: Transformer(shape, V, S))
        assert "even head dimension" in text and "got 15" in text
    for keys in (
        {"name": "fox", "gate": "quadratic"},
        {"name": "fox", "theta": 1.0},
        {"name": "path", "rank": 0},
        {"name": "path", "width": 1},
        {"name": "selective_rope", "theta": 0.5},
        {"name": "carope", "start": "alibi"},
    ):
        refusal(ValidationError, lambda keys=keys: ModelSettings(position=keys))


def test_valid_overrides():
    trained = ModelSettings(position={"name": "fox", "rotary": True})
    check_override(
        trained, ModelSettings(position={"name": "fox", "rotary": True, "theta": 5e5, "window": 9})
    )
    text = refusal(
        ModelError, lambda: check_override(trained, ModelSettings(position={"name": "fox"}))
    )
    assert "rotary" in text and "theta" in text
    old, new = (ModelSettings(position={"name": "carope", "theta": t}) for t in (1e4, 1e5))
    assert "theta" in refusal(ModelError, lambda: check_override(old, new))
