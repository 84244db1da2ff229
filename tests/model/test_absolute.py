"""Schemes that change token embeddings, against formulas, transformers and hand-computed cases;
declared lengths, fractional positions and limits."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2Model
from transformers.models.flaubert.modeling_flaubert import create_sinusoidal_embeddings
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

from model import TokenPositions
from model.position import PositionalScheme
from tests.model.alone import L0, added, doubles, normal, put, scheme_of
from tests.model.zoo import V, close, ids

OFFSET = 300
BASE = 50.0
# Scheme, settings, width, and feature i at position n.
FORMULAS = [
    ("integer", {"scale": 0.3}, 5, lambda n, i: 0.3 * n),
    ("unit_interval", {}, 5, lambda n, i: n / 16),
    ("unit_interval", {"denominator": "current"}, 5, lambda n, i: n / 900),
    ("binary", {}, 13, lambda n, i: int(bin(n)[2:].zfill(13)[i])),
    ("sine", {}, 7, lambda n, i: math.sin(n / 2**i)),
    ("sine", {"base": BASE}, 12, lambda n, i: math.sin(n / BASE ** (i / 11))),
    ("sine", {"base": BASE}, 1, lambda n, i: math.sin(n)),
    (
        "sinusoidal",
        {"theta": BASE, "offset": 2, "stretch": 2.5},
        10,
        lambda n, i: (math.sin, math.cos)[i % 2]((n / 2.5 + 2) * BASE ** (-(i // 2) / 5)),
    ),
    (
        "sinusoidal",
        {"theta": BASE, "stretch": "auto"},  # 900 / 16
        10,
        lambda n, i: (math.sin, math.cos)[i % 2](n * 16 / 900 * BASE ** (-(i // 2) / 5)),
    ),
]


@pytest.mark.parametrize(("name", "keys", "dim", "feature"), FORMULAS)
def test_formula(name, keys, dim, feature):
    scheme = scheme_of(name, dim=dim, **keys)
    positions = TokenPositions.plain(5, offset=OFFSET, length=900)
    expected = [[feature(n, i) for i in range(dim)] for n in range(OFFSET, OFFSET + 5)]
    x = normal(2, 5, dim)
    out = scheme.embed(x, scheme.tables(positions, torch.float64), positions)
    close(out, x + doubles(expected), atol=1e-12)
    assert not list(scheme.parameters())


def test_tokens_scaled_by_the_root_of_the_width():
    scheme = scheme_of("sinusoidal", dim=9, scale_tokens=True)
    positions = TokenPositions.plain(1)  # sin 0 and cos 0 in turn
    x = normal(2, 1, 9)
    out = scheme.embed(x, scheme.tables(positions, torch.float64), positions)
    close(out, 3 * x + doubles([0, 1, 0, 1, 0, 1, 0, 1, 0]), atol=1e-12)


@pytest.mark.parametrize("dim", [9, 10, 28])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_sinusoids_with_an_offset_against_huggingface(dim, offset):
    n = 40

    def rows(layout: str) -> torch.Tensor:
        scheme = scheme_of("sinusoidal", dim=dim, layout=layout, offset=offset)
        return added(scheme, TokenPositions.plain(n))[0].float()

    flaubert = create_sinusoidal_embeddings(n + offset, dim, torch.zeros(n + offset, dim))
    close(rows("interleaved"), flaubert[offset:], atol=1e-6)
    roformer = RoFormerSinusoidalPositionalEmbedding(n + offset, dim).create_weight()
    close(rows("half"), roformer[offset:], atol=1e-6)
    if dim % 2 == 0:  # theirs has float32 angles
        close(rows("half"), create_sinusoidal_positions(n + offset, dim)[offset:], atol=1e-5)


@torch.no_grad()
def test_learned_table_matches_gpt2_with_left_padding():
    config = GPT2Config(
        vocab_size=V,
        n_positions=11,
        n_embd=8,
        n_layer=1,
        n_head=2,
    )
    theirs = GPT2Model(config).eval()
    scheme = put(scheme_of("learned", dim=8, train=11), weight=theirs.wpe.weight)
    tokens = ids(2, 9)
    positions = TokenPositions.left_padded([9, 4], 9)
    expected = theirs(tokens, position_ids=positions.position, output_hidden_states=True)
    x = theirs.wte(tokens).double()
    ours = scheme.embed(x, scheme.tables(positions, torch.float64), positions)
    close(ours.float(), expected.hidden_states[0], atol=1e-6)


def learned(rows: int, extend: str, dim: int = 3) -> PositionalScheme:
    return scheme_of("learned", dim=dim, train=50, max_length=rows, extend=extend)


@pytest.mark.parametrize("length", [5, 6, 9, 17])
def test_table_is_stretched_over_declared_length(length):
    """The first and the last row stay; torch's own resampling with aligned corners agrees."""
    scheme = learned(5, "interpolate")
    out = added(scheme, TokenPositions.plain(length))[0]
    table = scheme.weight.detach()
    expected = F.interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T
    close(out, expected, atol=1e-13)
    close(out[[0, -1]], table[[0, -1]], atol=0)


def test_rows_of_different_declared_lengths():
    """At the last token of two rows: fractions of the length, stretched sinusoids, and a table that
    is stretched over the length."""
    lengths = (L0, 57)
    rows = replace(TokenPositions.plain(L0), lengths=lengths)
    last = L0 - 1
    fraction = added(scheme_of("unit_interval", denominator="current"), rows, 2)
    wave = added(scheme_of("sinusoidal", theta=BASE, stretch="auto"), rows, 2)
    scheme = scheme_of("learned", max_length=8, extend="interpolate")
    table = scheme.weight.detach()
    mixed = added(scheme, rows, 2).detach()
    for row, length in enumerate(lengths):
        assert fraction[row, -1, 0].item() == pytest.approx(last / length)
        assert wave[row, -1, 0].item() == pytest.approx(math.sin(last * L0 / length))
        index = last * 7 / (length - 1)
        low = math.floor(index)
        share = index - low
        expected = table[low] * (1 - share) + table[min(low + 1, 7)] * share
        close(mixed[row, -1], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("extend", "rows"), [("repeat", [3, 0, 1, 2, 3, 0]), ("clip", [3, 3, 3, 3, 3, 3])]
)
def test_table_repeats_or_clips(extend, rows):
    scheme = learned(4, extend)
    close(added(scheme, TokenPositions.plain(6, offset=3))[0], scheme.weight[rows], atol=0)


def test_integers_along_a_learned_direction():
    scheme = scheme_of("integer", dim=6, scale=0.5, direction="learned")
    (direction,) = scheme.parameters()
    assert direction.shape == (6,)
    assert direction.std() > 0.3
    out = added(scheme, TokenPositions.plain(4, offset=2))[0]
    close(out, doubles(range(2, 6))[:, None] * 0.5 * direction, atol=1e-15)
    wide = scheme_of("integer", dim=4000, direction="learned")
    wide.initialize(torch.Generator().manual_seed(0), 0.02)
    assert float(next(wide.parameters()).detach().std()) == pytest.approx(0.02, rel=0.05)
