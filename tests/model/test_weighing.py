"""Schemes that compute attention weights, against loops over pairs, published code and closed
forms.

Every oracle derives the visible keys of a query from orders and documents, in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import XLNetConfig
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.speecht5.modeling_speecht5 import SpeechT5RelativePositionalEncoding
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from model import SCHEMES, TokenPositions
from model.attention.kernels import attend
from model.position import AttentionContext, HeadGeometry, PositionalScheme
from model.position.pairwise import two_layers
from model.position.schemes.cope import Cope
from tests.model.zoo import close, packed

B = 2
H = 6
G = 3
D = 8
C = 21
# keys, and queries where a cache stands before them
S = 11
Q = 7
SCALE = D**-0.5


def made(name: str, *, initial: bool = False, **keys) -> PositionalScheme:
    """The scheme alone; unless `initial`, with every parameter drawn large enough to matter."""
    settings, scheme = SCHEMES[name]
    out = scheme(settings(**keys), HeadGeometry(C, H, D, S, S, G)).double()
    generator = torch.Generator().manual_seed(4)
    out.initialize(generator, 1.0)
    if not initial:
        with torch.no_grad():
            for p in out.parameters():
                p.copy_(0.6 * torch.randn(p.shape, generator=generator))
    return out


def tensors(queries: int, seed: int = 0) -> list[Tensor]:
    """q (B, H, Q, D), k and v (B, G, S, D)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, queries, D), (B, G, S, D), (B, G, S, D))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [1.5 * q, k, v]


def run(
    scheme: PositionalScheme,
    positions: TokenPositions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str = "auto",
) -> Tensor:
    """(B, H, Q, D) attention of the last Q places to all of them, under the scheme."""
    new = positions.last(q.shape[2])
    s = scheme.settings
    tables = scheme.tables(new, torch.float64)
    context = AttentionContext(
        new, new, positions, B, H, torch.device("cpu"), tables, window=s.window, sinks=s.sinks
    )
    return attend(scheme.plan(context).read(q, k), v, SCALE, kernel)


def skipping() -> TokenPositions:
    """Plain rows whose positions skip, each row its own."""
    plain = TokenPositions.plain(S)
    position = torch.stack([plain.order[0] * 2, (plain.order[0] ** 2) // 3])
    return replace(plain, position=position, position_end=int(position.max()) + 1, unit_steps=False)


LAYOUTS = {
    "plain": lambda: TokenPositions.plain(S),
    "ragged": lambda: TokenPositions.left_padded([S, S - 3], S),
    "packed": lambda: packed([[3, S - 3], [6, S - 6]]),
    "skipping": skipping,
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
windows = pytest.mark.parametrize("window", [{}, {"window": 4}, {"window": 3, "sinks": 2}], ids=str)


def seen_by(
    positions: TokenPositions, b: int, me: int, window: int | None = None, sinks: int = 0
) -> list[int]:
    order = positions.order.expand(B, -1)[b]
    document = positions.document.expand(B, -1)[b]
    return [
        j
        for j in range(S)
        if document[j] == document[me]
        and order[j] <= order[me]
        and (window is None or order[me] - order[j] < window or order[j] < sinks)
    ]


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def by_loops(
    weigh, positions: TokenPositions, q: Tensor, k: Tensor, v: Tensor, values=None, **window
) -> Tensor:
    """weigh(head, query, keys, distances) gives the weights of one query's visible keys;
    values(distance) is added to a value."""
    out = torch.zeros_like(q)
    queries = q.shape[2]
    position = positions.position.expand(B, -1)
    for b in range(B):
        for i in range(queries):
            me = S - queries + i
            if positions.document.expand(B, -1)[b, me] < 0:
                continue
            keys = seen_by(positions, b, me, **window)
            away = [int(position[b, me] - position[b, j]) for j in keys]
            for h in range(H):
                g = h // (H // G)
                weights = weigh(h, q[b, h, i], [k[b, g, j] for j in keys], away)
                for w, j, d in zip(weights, keys, away, strict=True):
                    out[b, h, i] += w * (v[b, g, j] if values is None else v[b, g, j] + values(d))
    return out


def real(positions: TokenPositions, queries: int) -> Tensor:
    return positions.document.expand(B, -1)[:, S - queries :] >= 0  # (B, Q)


def agree(found: Tensor, expected: Tensor, positions: TokenPositions) -> None:
    keep = real(positions, found.shape[2])
    close(found.transpose(1, 2)[keep], expected.transpose(1, 2)[keep], atol=1e-12)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@windows
@every_layout
@pytest.mark.parametrize("gate", ["scaled", "unscaled"])
@torch.no_grad()
def test_cope_matches_loops(gate, layout, window):
    """Counts of visible keys only; four rows, so that many counts are clamped and many are not."""
    scheme = made("cope", positions=4, gate=gate, **window)
    positions = LAYOUTS[layout]()
    rows = scheme.weight
    clamped = []

    def weigh(h, q, keys, away):
        scores = [float(q @ k) * SCALE for k in keys]
        gates = [sigmoid(x if gate == "scaled" else x / SCALE) for x in scores]
        logits = []
        for m, score in enumerate(scores):
            p = min(sum(gates[m:]), 3.0)
            clamped.append(p == 3.0)
            low = math.floor(p)
            high = math.ceil(p)
            logits.append(
                score + (1 - (p - low)) * float(q @ rows[low]) + (p - low) * float(q @ rows[high])
            )
        return softmax(logits)

    tensor = tensors(Q)
    agree(run(scheme, positions, *tensor), by_loops(weigh, positions, *tensor, **window), positions)
    assert not all(clamped) and (any(clamped) or window == {"window": 4})


@windows
@every_layout
@pytest.mark.parametrize("values", [False, True])
@torch.no_grad()
def test_shaw_matches_loops(values, layout, window):
    scheme = made("shaw", clip=3, values=values, **window)
    positions = LAYOUTS[layout]()

    def weigh(h, q, keys, away):
        return softmax(
            [
                float(q @ (k + scheme.key[min(d, 3)])) * SCALE
                for k, d in zip(keys, away, strict=True)
            ]
        )

    def beside(d):
        return scheme.value[min(d, 3)]

    tensor = tensors(Q)
    expected = by_loops(weigh, positions, *tensor, values=beside if values else None, **window)
    for kernel in ("auto", "flex"):
        agree(run(scheme, positions, *tensor, kernel), expected, positions)


@torch.no_grad()
def test_shaw_matches_speecht5():
    scheme = made("shaw", clip=4)
    clip = 4
    theirs = SpeechT5RelativePositionalEncoding(D, clip + 1).double()
    nn.init.constant_(theirs.pe_k.weight, math.nan)  # the future's rows: hidden below
    theirs.pe_k.weight[clip + 1 :] = scheme.key  # row max_length + distance
    q, k, v = tensors(S)
    beside = theirs(torch.zeros(1, S, D))  # (S, S, D)
    k = k.repeat_interleave(H // G, 1)
    values = v.repeat_interleave(H // G, 1)
    logits = (q @ k.mT + (q.transpose(1, 2) @ beside.mT).transpose(1, 2)) * SCALE
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(future, -math.inf).softmax(-1) @ values
    close(run(scheme, TokenPositions.plain(S), q, k[:, :: H // G], v), expected, atol=1e-12)


def sinusoid(d: float) -> Tensor:
    angles = [d / 10_000 ** (2 * i / C) for i in range((C + 1) // 2)]
    waves = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(waves[:C], dtype=torch.float64)


@pytest.mark.parametrize("queries", [1, Q, S])
@torch.no_grad()
def test_transformer_xl_matches_xlnet_relative_shift(queries):
    """Also with a cache before the queries, where the shift is easily off by one."""
    scheme = made("transformer_xl")
    config = XLNetConfig(d_model=H * D, n_head=H, d_inner=8, n_layer=1, vocab_size=8, dropout=0.0)
    theirs = XLNetRelativeAttention(config).double().eval()
    theirs.r_w_bias.copy_(scheme.u)
    theirs.r_r_bias.copy_(scheme.v)
    q, k, v = tensors(queries)
    # XLNet's order of the axes is (position, batch, head, feature); distances fall from S to 1 − Q.
    r = torch.stack([scheme.weight @ sinusoid(d) for d in range(S, -queries, -1)]).view(-1, 1, H, D)
    many = [x.repeat_interleave(H // G, 1).permute(2, 0, 1, 3) for x in (k, v)]
    hidden = torch.ones(queries, S).triu(S - queries + 1)[:, :, None, None].expand(-1, -1, B, 1)
    expected = theirs.rel_attn_core(
        q.permute(2, 0, 1, 3), *many, r.expand(-1, B, -1, -1), attn_mask=hidden.double()
    )
    close(run(scheme, TokenPositions.plain(S), q, k, v), expected.permute(1, 2, 0, 3), atol=1e-12)


@windows
@every_layout
@pytest.mark.parametrize("base", ["kerple", "alibi"])
@torch.no_grad()
def test_dape_matches_linear_layers(base, layout, window):
    """Theirs has a constant behind the second layer, drawn at random: the softmax does not see
    it."""
    scheme = made("dape", base=base, width=5, **window)
    positions = LAYOUTS[layout]()
    if base == "kerple":
        scheme.r1.abs_()[0] = -0.3  # below the floor of 0.01
        scheme.r2.abs_()
    net = nn.Sequential(nn.Linear(2 * H, 5), nn.LeakyReLU(), nn.Linear(5, H)).double()
    net[0].weight.copy_(scheme.weight1)
    net[0].bias.copy_(scheme.bias1)
    net[2].weight.copy_(scheme.weight2)
    q, k, v = tensors(Q)
    d = positions.position.expand(B, -1)
    d = (d[:, S - Q :, None] - d[:, None, :]).clamp(min=0).double()[:, None]  # (B, 1, Q, S)
    if base == "alibi":
        bias = -_get_alibi_slopes(H, "cpu").double()[:, None, None] * d
    else:
        r1, r2 = (r.clamp(min=0.01)[:, None, None] for r in (scheme.r1, scheme.r2))
        bias = -r1 * torch.log(1 + r2 * d)
    scores = q @ k.repeat_interleave(H // G, 1).mT * SCALE
    adapted = net(torch.cat([scores, bias.expand_as(scores)], 1).permute(0, 2, 3, 1)).permute(
        0, 3, 1, 2
    )
    logits = scores + bias + adapted
    seen = torch.zeros(B, 1, Q, S, dtype=torch.bool)
    for b in range(B):
        for i in range(Q):
            seen[b, 0, i, seen_by(positions, b, S - Q + i, **window)] = True
    expected = logits.masked_fill(~seen, -math.inf).softmax(-1) @ v.repeat_interleave(H // G, 1)
    agree(run(scheme, positions, q, k, v), expected, positions)


@windows
@every_layout
@pytest.mark.parametrize("remainder", ["self", "drop"])
@torch.no_grad()
def test_stick_breaking_matches_product(remainder, layout, window):
    scheme = made("stick_breaking", remainder=remainder, **window)
    positions = LAYOUTS[layout]()

    def weigh(h, q, keys, away):
        # the last visible key is the query's
        shares = [sigmoid(float(q @ k) * SCALE) for k in keys[:-1]]
        weights = [a * math.prod(1 - b for b in shares[m + 1 :]) for m, a in enumerate(shares)]
        rest = math.prod(1 - b for b in shares)
        assert math.isclose(sum(weights) + rest, 1)
        return [*weights, rest if remainder == "self" else 0.0]

    tensor = tensors(Q)
    agree(run(scheme, positions, *tensor), by_loops(weigh, positions, *tensor, **window), positions)


CASES = {
    "cope": {"positions": 4},
    "shaw": {"clip": 3, "values": True},
    "transformer_xl": {},
    "dape": {},
    "stick_breaking": {},
}


@windows
@pytest.mark.parametrize("layout", ["plain", "packed", "skipping"])
@pytest.mark.parametrize("name", CASES)
def test_small_blocks_match_one_block_with_gradients(name, layout, window, monkeypatch):
    positions = LAYOUTS[layout]()
    found = []
    direction = torch.randn(
        B, H, S, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    for size in (S, 3):
        monkeypatch.setattr(
            "model.attention.explicit.query_block", lambda rows, keys, size=size: size
        )
        scheme = made(name, **CASES[name], **window)
        leaves = [x.requires_grad_() for x in tensors(S)]
        out = run(scheme, positions, *leaves)
        (out * direction).sum().backward()
        found.append([out.detach(), *(x.grad for x in (*leaves, *scheme.parameters()))])
        dense = run(scheme, positions, *leaves, kernel="dense").detach()
        close(dense, found[-1][0], atol=1e-12)
    for one, many in zip(*found, strict=True):
        assert one.abs().max() > 1e-3
        close(many, one, atol=1e-11)


@windows
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("gate", ["scaled", "unscaled"])
def test_gates_of_keys_beyond_the_last_count_of_cope_do_not_matter(
    gate, layout, window, monkeypatch
):
    positions = LAYOUTS[layout]()
    found = []
    skipped = []
    start = Cope._start

    def recorded(self, *arguments):
        skipped.append(start(self, *arguments))
        return skipped[-1]

    monkeypatch.setattr(Cope, "_start", recorded)
    monkeypatch.setattr("model.attention.explicit.query_block", lambda rows, keys: 3)
    for keys in (S, 1):
        monkeypatch.setattr("model.position.schemes.cope.KEYS_AT_ONCE", keys)
        scheme = made("cope", positions=2, gate=gate, **window)
        leaves = [x.requires_grad_() for x in tensors(S)]
        out = run(scheme, positions, *leaves)
        found.append(
            [
                out.detach(),
                *torch.autograd.grad(out.square().sum(), [*leaves, *scheme.parameters()]),
            ]
        )
    for one, other in zip(*found, strict=True):
        close(other, one, atol=1e-12)
    assert any(skipped) or layout == "packed" or window


def test_gradients_of_a_network_in_blocks_of_pairs(monkeypatch):
    monkeypatch.setattr("model.position.pairwise.PAIRS_AT_ONCE", 4)
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 11), (5, 2), (5, 1), (3, 5)
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    x, inner, bias, outer = leaves
    expected = outer @ (inner @ x + bias).relu()
    found = two_layers(*leaves)
    close(found, expected, atol=1e-13)
    factor = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        *(torch.autograd.grad((y * factor).sum(), leaves) for y in (found, expected)), strict=True
    ):
        close(a, b, atol=1e-12)


@torch.no_grad()
def test_initialization_matches_documentation():
    """CoPE as NoPE; DAPE as its bias alone; Transformer-XL without the two global biases."""
    tensor = tensors(Q)
    positions = TokenPositions.plain(S)
    none = run(made("none"), positions, *tensor)
    close(run(made("cope", initial=True), positions, *tensor), none, atol=1e-13)
    alibi = run(made("alibi"), positions, *tensor)
    close(run(made("dape", initial=True, base="alibi"), positions, *tensor), alibi, atol=1e-13)
    dape = made("dape", initial=True)
    assert (
        dape.r1.min() >= 0 and 1 < dape.r1.max() <= 2 and dape.r2.min() >= 0 and dape.r2.max() <= 1
    )
    scheme = made("transformer_xl", initial=True)
    assert not scheme.u.any() and not scheme.v.any()
    assert float(scheme.weight.std()) == pytest.approx(C**-0.5, rel=0.1)
    assert (run(scheme, positions, *tensor) - none).abs().max() > 0.05
    assert float(made("shaw", initial=True).key.std()) == pytest.approx(D**-0.5, rel=0.2)
