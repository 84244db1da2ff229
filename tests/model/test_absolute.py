"""Schemes that change token embeddings, against formulas, transformers and hand-computed cases;
declared lengths, fractional positions and limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2Model
from transformers.models.flaubert.modeling_flaubert import create_sinusoidal_embeddings
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

from model import ModelSettings, TokenPositions, Transformer
from model.position import PositionalScheme
from tests.model.alone import added, at, doubles, normal, put, scheme_of
from tests.model.zoo import V, build, close, ids, refusal

OFFSET = 300
BASE = 50.0
# Scheme, settings, width, and feature i at position n.
FORMULAS = [
    ("integer", {"scale": 0.3}, 5, lambda n, i: 0.3 * n),
    ("unit_interval", {}, 5, lambda n, i: n / 16),
    ("unit_interval", {"denominator": "current"}, 5, lambda n, i: n / 900),
    ("binary", {}, 13, lambda n, i: int(bin(n)[2:].zfill(13)[i])),
    ("sine", {}, 7, lambda n, i: math.sin(n / 2**i)),
    ("sine", {}, 1, lambda n, i: math.sin(n)),
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


def test_integers_along_a_learned_direction():
    scheme = scheme_of("integer", dim=6, scale=0.5, direction="learned")
    (direction,) = scheme.parameters()
    assert direction.shape == (6,) and direction.std() > 0.3
    out = added(scheme, TokenPositions.plain(4, offset=2))[0]
    close(out, doubles(range(2, 6))[:, None] * 0.5 * direction, atol=1e-15)
    wide = scheme_of("integer", dim=4000, direction="learned")
    wide.initialize(torch.Generator().manual_seed(0), 0.02)
    assert float(next(wide.parameters()).detach().std()) == pytest.approx(0.02, rel=0.05)


def test_fraction_of_each_rows_declared_length():
    scheme = scheme_of("unit_interval", dim=3, denominator="current")
    assert scheme.depends_on_length
    ragged = TokenPositions.left_padded([5, 2], 5, lengths=[7, 30])
    expected = doubles([[0, 1 / 7, 2 / 7, 3 / 7, 4 / 7], [0, 0, 0, 0, 1 / 30]])
    close(added(scheme, ragged, rows=2), expected[..., None].expand(2, 5, 3), atol=1e-16)


def test_binary_is_limited_by_width():
    model = Transformer(ModelSettings(dim=4, heads=2, layers=1, position={"name": "binary"}), V, 10)
    with torch.no_grad():
        model(ids(1, 16))  # beyond the trained length, up to 2^4
        for positions in (TokenPositions.plain(17), TokenPositions.plain(3, offset=14)):
            tokens = ids(1, positions.order.shape[1])
            text = refusal(lambda p=positions, t=tokens: model(t, p))
            assert "'binary'" in text and "offset + T = 17" in text and "16 tokens" in text


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


def test_tokens_are_multiplied_by_the_root_of_the_width():
    x = normal(2, 3, 4)
    positions = TokenPositions.plain(3)
    plain, scaled = (scheme_of("sinusoidal", dim=4, scale_tokens=s) for s in (False, True))
    tables = plain.tables(positions, torch.float64)
    difference = scaled.embed(x, tables, positions) - plain.embed(x, tables, positions)
    close(difference, x, atol=1e-14)


@torch.no_grad()
def test_learned_table_matches_gpt2_with_left_padding():
    config = GPT2Config(vocab_size=V, n_positions=11, n_embd=8, n_layer=1, n_head=2)
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


# Positions, and rows of the table 0, 10, 30, 20. Seven tokens: token n has row n/2.
STRETCHED = [
    (TokenPositions.plain(7), [[0, 5, 10, 20, 30, 25, 20]]),
    # Up to four tokens the table is not stretched.
    (TokenPositions.plain(3), [[0, 10, 30]]),
    # The declared length counts, not the tokens of the pass.
    (TokenPositions.plain(2, offset=3, length=7), [[20, 30]]),
    # Rows of one batch have their own declared lengths.
    (TokenPositions.left_padded([3, 2], 3, lengths=[7, 4]), [[0, 5, 10], [0, 0, 10]]),
    # Real positions lie between rows; those outside the declared length have its first or last.
    (at([-3.5, -0.5, 0.0, 0.5], 7), [[0, 0, 0, 2.5]]),
    (at([0.25, 2.5, 9.0], 4), [[2.5, 25, 20]]),
    (at([0.5, 5.0, 70.0], 7), [[2.5, 25, 20]]),
]


@pytest.mark.parametrize(("positions", "expected"), STRETCHED)
def test_stretched_table_values(positions, expected):
    scheme = put(learned(4, "interpolate", dim=1), weight=[[0.0], [10.0], [30.0], [20.0]])
    out = added(scheme, positions, rows=len(expected))[..., 0]
    close(out, doubles(expected), atol=1e-14)


@pytest.mark.parametrize(
    ("extend", "rows"), [("repeat", [3, 0, 1, 2, 3, 0]), ("clip", [3, 3, 3, 3, 3, 3])]
)
def test_table_repeats_or_clips(extend, rows):
    scheme = learned(4, extend)
    close(added(scheme, TokenPositions.plain(6, offset=3))[0], scheme.weight[rows], atol=0)


@pytest.mark.parametrize("extend", ["repeat", "clip", "interpolate"])
def test_table_of_one_row(extend):
    scheme = learned(1, extend)
    assert scheme.limit is None
    close(added(scheme, TokenPositions.plain(5))[0], scheme.weight.expand(5, 3), atol=1e-15)


@pytest.mark.parametrize("case", ["learned", "learned-repeat", "learned-clip", "binary"])
def test_real_positions_are_rejected_where_unsupported(case):
    model = build(case)
    tokens = ids(1, 6)
    plain = TokenPositions.plain(6)
    assert not model.position["all"].supports_fractions
    cache = model.make_cache(1, 9)
    with torch.no_grad():
        for position in (plain.position / 2, plain.position.double()):
            positions = replace(plain, position=position, unit_steps=False)
            text = refusal(lambda p=positions: model(tokens, p, cache=cache))
            assert f"'{case.split('-')[0]}'" in text and "integer positions" in text
            assert ("model.position.extend to interpolate" in text) == case.startswith("learned")
        assert cache.filled == 0
