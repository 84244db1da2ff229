"""Sinusoids and learned tables against independent formulas, transformers and hand-computed cases;
additive schemes with declared lengths, fractional positions and invalid settings."""

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

from model import TokenPositions
from model.position import PositionalScheme
from tests.model.alone import added, at, doubles, made
from tests.model.zoo import V, build, close, ids, refusal


@pytest.mark.parametrize("dim", [9, 28])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_sinusoids_with_an_offset_against_huggingface(dim, offset):
    n = 40
    rows = {
        layout: added(
            made("sinusoidal", dim, layout=layout, offset=offset), TokenPositions.plain(n)
        )[0].float()
        for layout in ("interleaved", "half")
    }
    flaubert = create_sinusoidal_embeddings(n + offset, dim, torch.zeros(n + offset, dim))
    close(rows["interleaved"], flaubert[offset:], atol=1e-6)
    roformer = RoFormerSinusoidalPositionalEmbedding(n + offset, dim).create_weight()
    close(rows["half"], roformer[offset:], atol=1e-6)
    if dim % 2 == 0:  # theirs has float32 angles
        close(rows["half"], create_sinusoidal_positions(n + offset, dim)[offset:], atol=1e-5)


@pytest.mark.parametrize(
    ("stretch", "length", "factor"), [(2.5, 90, 2.5), ("auto", 40, 2.5), ("auto", 9, 1)]
)
def test_sinusoids_at_positions_divided_by_the_stretch(stretch, length, factor):
    dim = 10
    offset = 2
    theta = 300.0
    scheme = made("sinusoidal", dim, stretch=stretch, offset=offset, theta=theta)
    rows = added(scheme, at([0, 1, 5, 8], length))[0]
    speeds = [theta ** (-2 * k / dim) for k in range(dim // 2)]
    for row, n in zip(rows, (0, 1, 5, 8), strict=True):
        angles = [(n / factor + offset) * speed for speed in speeds]
        expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
        close(row, doubles(expected), atol=1e-14)
    for i, n in enumerate((0, 1, 5, 8)):  # offsets cancel, the stretch does not
        cosines = sum(math.cos(speed * (8 - n) / factor) for speed in speeds)
        assert float(rows[3] @ rows[i]) == pytest.approx(cosines, abs=1e-12)


def gpt2(rows: int, dim: int) -> GPT2Model:
    return GPT2Model(
        GPT2Config(vocab_size=V, n_positions=rows, n_embd=dim, n_layer=1, n_head=2)
    ).eval()


@torch.no_grad()
def test_learned_table_matches_gpt2_with_left_padding():
    theirs = gpt2(11, 8)
    scheme = made("learned", 8, train=11)
    tokens = ids(2, 9)
    scheme.weight.copy_(theirs.wpe.weight)
    positions = TokenPositions.left_padded([9, 4], 9)
    given = theirs(
        tokens, position_ids=positions.position, output_hidden_states=True
    ).hidden_states[0]
    x = theirs.wte(tokens).double()
    ours = scheme.embed(x, scheme.tables(positions, torch.float64), positions)
    close(ours.float(), given, atol=1e-6)


def learned(rows: int, extend: str, dim: int = 3) -> PositionalScheme:
    return made("learned", dim, train=50, max_length=rows, extend=extend)


@pytest.mark.parametrize("length", [5, 6, 9, 17])
def test_table_is_stretched_over_declared_length(length):
    """The first and the last row stay; torch's own resampling with aligned corners agrees."""
    scheme = learned(5, "interpolate")
    out = added(scheme, TokenPositions.plain(length))[0]
    table = scheme.weight.detach()
    expected = F.interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T
    close(out, expected, atol=1e-13)
    close(out[[0, -1]], table[[0, -1]], atol=0)


def test_stretched_table_values():
    scheme = learned(4, "interpolate", dim=1)
    with torch.no_grad():
        scheme.weight.copy_(doubles([[0.0], [10.0], [30.0], [20.0]]))
    # Seven tokens over four rows: token n stands at row n/2.
    close(
        added(scheme, TokenPositions.plain(7)).flatten(),
        doubles([0, 5, 10, 20, 30, 25, 20]),
        atol=1e-14,
    )
    # Four or fewer stretch nothing; a declared length decides, not the tokens of the pass.
    close(added(scheme, TokenPositions.plain(3)).flatten(), doubles([0, 10, 30]), atol=0)
    close(
        added(scheme, TokenPositions.plain(2, offset=3, length=7)).flatten(),
        doubles([20, 30]),
        atol=1e-14,
    )
    # Rows of one batch have their own declared lengths.
    ragged = TokenPositions.left_padded([3, 2], 3, lengths=[7, 4])
    close(added(scheme, ragged, rows=2)[..., 0], doubles([[0, 5, 10], [0, 0, 10]]), atol=1e-14)
    # Real positions lie between rows; those outside the declared length stay at its ends.
    close(
        added(scheme, at([-3.5, -0.5, 0.0, 0.5], 7)).flatten(), doubles([0, 0, 0, 2.5]), atol=1e-14
    )
    close(added(scheme, at([0.25, 2.5, 9.0], 4)).flatten(), doubles([2.5, 25, 20]), atol=1e-14)
    close(added(scheme, at([0.5, 5.0, 70.0], 7)).flatten(), doubles([2.5, 25, 20]), atol=1e-14)


def test_table_repeats_clips_or_has_one_row():
    repeat = learned(4, "repeat")
    clip = learned(4, "clip")
    close(
        added(repeat, TokenPositions.plain(6, offset=3))[0],
        repeat.weight[[3, 0, 1, 2, 3, 0]],
        atol=0,
    )
    close(
        added(clip, TokenPositions.plain(6, offset=1))[0], clip.weight[[1, 2, 3, 3, 3, 3]], atol=0
    )
    for extend in ("repeat", "clip", "interpolate"):
        one = learned(1, extend)
        assert one.limit is None
        close(added(one, TokenPositions.plain(5))[0], one.weight.expand(5, 3), atol=1e-15)
        close(added(one, TokenPositions.plain(1))[0], one.weight, atol=0)


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
