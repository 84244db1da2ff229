"""Schemes that read the layer input, against formulas token by token for each document.

The references share no code with the schemes: the convolution is PyTorch's, rotations are products
of complex numbers.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import TokenPositions
from model.attention.kernels import attention_details
from model.attention.mask import SOFTMAX
from model.position import PositionalScheme
from tests.model.alone import (
    LAYOUTS,
    B,
    S,
    attended,
    by_documents,
    context_of,
    doubles,
    drawn,
    normal,
    scheme_of,
    visible,
    weighted,
)
from tests.model.zoo import CASES, C, D, G, H, build, close

INPUTS = normal(B, S, C, seed=9)
layouts = pytest.mark.parametrize("layout", ["plain", "ragged", "packed"])


def random(name: str, **keys) -> PositionalScheme:
    """The scheme with every parameter drawn."""
    scheme = scheme_of(name, **keys)
    with torch.no_grad():
        for n, weight in enumerate(scheme.parameters()):
            scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 else 1
            weight.copy_(normal(*weight.shape, seed=n) * scale)
    return scheme


def with_gradients(scheme, out: Tensor, layout: str) -> list[Tensor]:
    """The attention of the tokens that are no padding, and gradients of the scheme's parameters."""
    out = out * (LAYOUTS[layout].document.expand(B, -1)[:, None, :, None] >= 0)
    return [out, *torch.autograd.grad(out.square().sum(), list(scheme.parameters()))]


def by_logits(scheme, layout: str, logits_of, window=None) -> list[Tensor]:
    """`with_gradients` from the logits of each document."""
    positions = LAYOUTS[layout]
    q, k, v = drawn(S)
    logits = by_documents(positions, logits_of, INPUTS, q, k)
    out = weighted(logits, v, visible(positions, S, window))
    return with_gradients(scheme, out, layout)


def check_kernel(scheme, layout: str, expected: list[Tensor], kernel: str) -> None:
    out = attended(scheme, LAYOUTS[layout], *drawn(S), kernel, INPUTS)
    for found, slow in zip(with_gradients(scheme, out, layout), expected, strict=True):
        assert slow.abs().max() > 1e-3
        close(found, slow, atol=1e-10)


def check(scheme, layout: str, logits_of, window=None, kernel="auto") -> None:
    check_kernel(scheme, layout, by_logits(scheme, layout, logits_of, window), kernel)


def convolved(scheme: PositionalScheme, x: Tensor) -> Tensor:
    """(t, E) of one document, by PyTorch's convolution: its last tap is the token itself."""
    conv = scheme.conv
    features, taps = conv.shape
    series = x @ scheme.down.mT @ scheme.up.mT
    padded = F.pad(series.mT, (taps - 1, 0))
    return F.conv1d(padded, conv.flip(1)[:, None], groups=features).mT


def turned(q: Tensor, k: Tensor, angle: Tensor) -> Tensor:
    """(H, t, t) logits of pairs (n, n + D/2) as complex numbers, rotated by angle (H, t, D/2)."""
    turn = torch.polar(torch.ones_like(angle), angle)
    a = torch.complex(*q.chunk(2, dim=-1)) * turn
    b = torch.complex(*k.chunk(2, dim=-1)) * turn
    return torch.einsum("htd,hsd->hts", a, b.conj()).real / math.sqrt(D)


@layouts
@pytest.mark.parametrize("kernel", ["auto", "dense", "explicit"])
def test_forget_gates_multiply_between_key_and_query(layout, kernel):
    scheme = random("fox")

    def logits_of(x, q, k):
        logits = torch.einsum("htd,hsd->hts", q, k) / math.sqrt(D)
        gates = (scheme.weight @ x.mT + scheme.bias[:, None]).sigmoid()  # (H, t)
        for n, m in itertools.product(range(len(x)), repeat=2):
            logits[:, n, m] += gates[:, m + 1 : n + 1].prod(1).log()
        return logits

    check(scheme, layout, logits_of, kernel=kernel)


def reflected(scheme: PositionalScheme):
    """Logits by the product of the matrices between query and key."""

    def logits_of(x, q, k):
        w = F.silu(convolved(scheme, x)).unflatten(-1, (G, D))
        w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        beta = 2 / (1 + torch.exp(-(x @ scheme.strength.mT + scheme.strength_bias)))  # (t, G)
        eye = torch.eye(D, dtype=torch.float64)
        rows = []
        for h, n in itertools.product(range(H), range(len(x))):
            g = h // (H // G)
            product = eye
            row = [torch.zeros((), dtype=torch.float64)] * len(x)
            for m in range(n, -1, -1):
                row[m] = q[h, n] @ product @ k[h, m] / math.sqrt(D)
                reflection = eye - beta[m, g] * torch.outer(w[m, g], w[m, g])
                product = product @ reflection
            rows.append(torch.stack(row))
        return torch.stack(rows).unflatten(0, (H, len(x)))

    return logits_of


@layouts
@pytest.mark.parametrize("window", [None, 4])
def test_path_multiplies_the_reflections_between_query_and_key(layout, window, monkeypatch):
    """With all queries at once, and with few queries and keys to a block and chunk."""
    scheme = random("path", window=window)
    expected = by_logits(scheme, layout, reflected(scheme), window)
    for kernel, queries, keys in (
        ("dense", 256, 128),
        ("auto", 256, 128),
        ("auto", 4, 3),
        ("auto", 3, 128),
    ):
        monkeypatch.setattr("model.attention.kernels.QUERY_BLOCK", queries)
        monkeypatch.setattr("model.position.schemes.path.CHUNK", keys)
        check_kernel(scheme, layout, expected, kernel)


@layouts
@pytest.mark.parametrize("kernel", ["auto", "dense"])
def test_selective_rope_rotates_by_cumulative_convolved_projections(layout, kernel):
    theta = 900.0
    scheme = random("selective_rope", theta=theta, rank=5)

    def logits_of(x, q, k):
        angle = convolved(scheme, x).unflatten(-1, (G, D // 2)).cumsum(0)
        angle = angle * doubles([theta ** (-2 * n / D) for n in range(D // 2)])
        return turned(q, k, angle.transpose(0, 1).repeat_interleave(H // G, 0))

    check(scheme, layout, logits_of, kernel=kernel)


@layouts
@pytest.mark.parametrize("start", ["rope", "paper"])
def test_carope_rotates_by_powers_of_each_tokens_base(layout, start):
    scheme = random("carope", start=start)

    def logits_of(x, q, k):
        z = x @ scheme.weight.mT + (0 if scheme.bias is None else scheme.bias)
        f = 1 / ((1 + z.exp()).log() + 1)  # (t, G)
        angle = (f[..., None] ** torch.arange(D // 2)).cumsum(0)
        return turned(q, k, angle.transpose(0, 1).repeat_interleave(H // G, 0))

    check(scheme, layout, logits_of)


@layouts
@pytest.mark.parametrize("gate_bias", [8.0, -3.0])
def test_wall_decays_every_feature_between_key_and_query(layout, gate_bias):
    """Strong gates underflow where the exact weight does."""
    scheme = scheme_of("wall", gate_bias=gate_bias)

    def logits_of(x, q, k):
        gates = F.logsigmoid(x @ scheme.weight.mT + scheme.bias)
        gates = gates.unflatten(-1, (H, D)).transpose(0, 1)  # (H, t, D)
        logits = torch.zeros(H, len(x), len(x), dtype=torch.float64)
        for n, m in itertools.combinations_with_replacement(range(len(x)), 2):
            decay = gates[:, n + 1 : m + 1].sum(1).exp()
            score = (q[:, m] * k[:, n] * decay).sum(-1)
            logits[:, m, n] = score / math.sqrt(D)
        return logits

    check(scheme, layout, logits_of)


@layouts
@pytest.mark.parametrize("kernel", ["auto", "dense", "explicit"])
def test_grape_a_scales_alibi_by_the_query(layout, kernel):
    scheme = random("grape_a")
    slopes = doubles([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])  # Press et al., six heads

    def logits_of(x, q, k):
        logits = torch.einsum("htd,hsd->hts", q, k) / math.sqrt(D)
        rows = []
        for h in range(H):
            v = scheme.direction[h] / scheme.direction[h].square().sum().sqrt()
            rate = slopes[h] * torch.log(1 + scheme.rate[h].exp())
            gate = torch.log(1 + torch.exp(q[h] @ v / math.sqrt(D)))
            rows.append(
                -rate * gate[:, None] * (torch.arange(len(x))[:, None] - torch.arange(len(x)))
            )
        return logits + torch.stack(rows).tril()

    check(scheme, layout, logits_of, kernel=kernel)


@layouts
@pytest.mark.parametrize(("window", "kernel"), [(None, "auto"), (4, "auto"), (None, "dense")])
def test_grape_ap_sums_gates_between_key_and_query(layout, window, kernel, monkeypatch):
    """Pairs (k, k + F/2) are complex numbers, which a position l multiplies by e^(−il)."""
    monkeypatch.setattr("model.attention.kernels.QUERY_BLOCK", 5)
    scheme = random("grape_ap", gate_features=6, window=window)
    slopes = doubles([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])

    def logits_of(x, q, k):
        p = (x @ scheme.project.mT).unflatten(-1, (H, 6))  # (t, H, F)
        unit = p / (p.square().mean(-1, keepdim=True) + torch.finfo(p.dtype).eps).sqrt()
        turns = torch.polar(torch.ones(len(x)).double(), -torch.arange(len(x)).double())
        turned = torch.complex(*unit.chunk(2, -1)) * turns[:, None, None]
        turned = torch.cat([turned.real, turned.imag], dim=-1)
        logits = torch.einsum("htd,hsd->hts", q, k) / math.sqrt(D)
        extra = torch.zeros_like(logits)
        for n, m in itertools.combinations(range(len(x)), 2):
            for between in range(n + 1, m + 1):
                products = (p[m] * turned[between]).sum(-1) / 6
                extra[:, m, n] = extra[:, m, n] - slopes * torch.log(1 + torch.exp(-products))
        return logits + extra

    check(scheme, layout, logits_of, window, kernel)


@torch.no_grad()
def test_grape_matches_the_released_code():
    """Biases of the last queries that the released modules computed in float32 for these
    weights."""
    scheme = scheme_of("grape_a", heads=2, groups=2, features=4)
    scheme.rate.copy_(doubles([0.3, -1.0]))
    scheme.direction.copy_(doubles([[1, 2, 0, -1], [0.5, 0, 1, 1]]))
    q = ((torch.arange(24).double() * 7 % 11 - 5) / 2).view(1, 3, 2, 4).transpose(1, 2)
    context = context_of(scheme, TokenPositions.plain(3), rows=1)
    (view,) = scheme.plan(context).read(q, q)
    bias = view.mask.bias(*view.mask.indices(0, 3, slice(0, 3)))
    close(bias[0, :, 2, 0], doubles([-0.13396112620830536, -0.0014095293590798974]), atol=1e-8)
    close(bias[0, :, 2, 1], doubles([-0.06698056310415268, -0.0007047646795399487]), atol=1e-8)
    close(bias[0, :, 1, 0], doubles([-0.0594232939183712, -0.0017593612428754568]), atol=1e-8)

    scheme = scheme_of("grape_ap", heads=2, groups=2, features=4, dim=16)
    scheme.project.copy_(torch.eye(16))
    x = ((torch.arange(64).double() * 5 % 13 - 6) / 3).view(1, 4, 16)
    context = context_of(scheme, TokenPositions.plain(4), rows=1)
    q = torch.zeros(1, 2, 4, 4).double()
    plan = scheme.plan(context).bind(x, None)
    details = attention_details(plan.read(q, q), q, 1.0, SOFTMAX, 0, 4, logits=True)
    found = details.logits[0]
    published = [
        [-0.22765323519706726, -0.1482875645160675, -0.0917850136756897, 0.0],
        [-0.011740526184439659, -0.009003846906125546, -0.005770361982285976, 0.0],
    ]
    close(found[:, 3], doubles(published), atol=1e-7)
    published = [
        [-0.11555634438991547, -0.06162264943122864, 0.0],
        [-0.005860587116330862, -0.003828552085906267, 0.0],
    ]
    close(found[:, 2, :3], doubles(published), atol=1e-7)


@pytest.mark.parametrize("case", ["fox", "path", "cope"])
def test_every_layer_has_its_own_parameters(case):
    net = build(CASES[case], layers=2)
    assert len(net.position) == 2
    first, second = net.position.values()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a is not b
