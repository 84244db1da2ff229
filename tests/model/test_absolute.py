"""Sinusoids and learned tables against independent formulas, transformers and hand-computed cases; additive
schemes with declared lengths, fractional positions and invalid settings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from transformers import GPT2Config, GPT2Model
from transformers.models.flaubert.modeling_flaubert import create_sinusoidal_embeddings
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

from model import ModelError, ModelSettings, TokenPositions, Transformer, check_override
from model.position import PositionalScheme
from tests.model.alone import added, at, doubles, made
from tests.model.zoo import TRAIN, T, V, build, cached, close, ids, settings_of

# Variants in which the declared length of a sequence changes its tokens.
FOLLOWERS = ["unit_interval-current", "sinusoidal-auto", "learned-interpolate"]


def message_of(error, call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_sinusoids_shift_by_linear_map():
    for name, keys, fits in (("sinusoidal", {"theta": 50.0}, True), ("sine", {}, False)):
        rows = added(made(name, 6, **keys), TokenPositions.plain(60))[0]
        found = torch.linalg.lstsq(rows[:-1], rows[1:]).solution
        off = (rows[:-1] @ found - rows[1:]).abs().max()
        assert (off < 1e-11) if fits else (off > 0.1)


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


@torch.no_grad()
def test_stretch_uses_original_length_of_extension():
    position = {"name": "sinusoidal", "stretch": "auto"}
    branch = Transformer(
        settings_of(position), V, train_length=2 * TRAIN, original_length=TRAIN
    ).double()
    branch.load_state_dict(build("sinusoidal").state_dict())
    fixed = build({"name": "sinusoidal", "stretch": T / TRAIN})
    tokens = ids(2, T)
    close(branch(tokens, TokenPositions.plain(T)), fixed(tokens, TokenPositions.plain(T)))


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


@torch.no_grad()
def test_learned_table_matches_opt_without_offset_rows():
    theirs = OPTLearnedPositionalEmbedding(9, 8)
    scheme = made("learned", 8, train=9)
    assert theirs.weight.shape[0] == 11
    scheme.weight.copy_(theirs.weight[2:])
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    ours = added(scheme, TokenPositions.left_padded([7, 4], 7), rows=2).float()
    close(ours[mask.bool()], theirs(mask)[mask.bool()], atol=1e-6)


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


def test_interpolated_row_gradient():
    scheme = learned(4, "interpolate")
    added(scheme, at([1, 2], 13)).sum().backward()  # rows 0.25 and 0.5
    assert scheme.weight.grad is not None
    close(scheme.weight.grad, doubles([[1.25] * 3, [0.75] * 3, [0.0] * 3, [0.0] * 3]), atol=1e-14)


def test_interpolation_weights_of_long_table_are_exact():
    """In float32, 8191·4095/8192 in rounded steps would be off by more than a thousandth."""
    scheme = learned(4096, "interpolate", dim=2)
    positions = at([8189], 9000)
    low, high, share = scheme.tables(positions, torch.float32)
    whole, part = divmod(8189 * 4095, 8999)
    assert (int(low), int(high)) == (whole, whole + 1)
    assert float(share) == pytest.approx(part / 8999, rel=1e-7)


@pytest.mark.parametrize("case", FOLLOWERS)
@torch.no_grad()
def test_declared_length_is_fixed_for_a_cache(case):
    model = build(case)
    tokens = ids(2, T)
    assert model.depends_on_length and not build(case.split("-")[0]).depends_on_length
    for length in (T, 2 * T):
        whole = model(tokens, TokenPositions.plain(T, length=length))
        close(cached(model, tokens, [4, 1, 1, 7, 6], length=length), whole)
    # Not causal in length: the same tokens announced as part of a longer text are others.
    assert (whole - model(tokens, TokenPositions.plain(T)))[:, 1].abs().max() > 1e-3
    cache = model.make_cache(2, T)
    model(tokens[:, :4], TokenPositions.plain(4, length=T), cache=cache)
    with pytest.raises(ModelError, match="declared length"):
        model(tokens[:, 4:6], TokenPositions.plain(2, offset=4, length=2 * T), cache=cache)


@pytest.mark.parametrize("case", FOLLOWERS)
@torch.no_grad()
def test_declared_length_per_row(case):
    model = build(case)
    tokens = ids(3, 15)
    counts = [15, 6, 9]
    lengths = [16, 70, 33]
    out = model(tokens, TokenPositions.left_padded(counts, 15, lengths=lengths))
    for r, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        alone = model(tokens[r : r + 1, 15 - count :], TokenPositions.plain(count, length=length))
        close(out[r, 15 - count :], alone[0])
        as_short = model(tokens[r : r + 1, 15 - count :], TokenPositions.plain(count))
        assert (as_short - alone).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("position", "same"),
    [
        ({"name": "integer"}, {"name": "integer", "scale": 0.5}),
        ({"name": "sinusoidal", "offset": 1}, {"name": "sinusoidal", "offset": 1, "stretch": 2.0}),
    ],
)
@torch.no_grad()
def test_half_positions_equal_integer_positions_at_half_frequency(position, same):
    tokens = ids(2, T)
    plain = TokenPositions.plain(T)
    halves = replace(plain, position=plain.position / 2, unit_steps=False)
    close(build(position)(tokens, halves), build(same)(tokens, plain))


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
            text = message_of(ModelError, lambda p=positions: model(tokens, p, cache=cache))
            assert f"'{case.split('-')[0]}'" in text and "integer positions" in text
            assert ("model.position.extend to interpolate" in text) == case.startswith("learned")
        assert cache.filled == 0


@pytest.mark.parametrize(
    "position",
    [
        {"name": "integer", "scale": 0.0},
        {"name": "integer", "scale": math.inf},
        {"name": "integer", "direction": "twos"},
        {"name": "unit_interval", "denominator": "declared"},
        {"name": "binary", "max_length": 0},
        {"name": "binary", "max_length": 2.5},
        {"name": "sine", "base": 1.0},
        {"name": "sine", "base": math.nan},
        {"name": "sinusoidal", "offset": -1},
        {"name": "sinusoidal", "offset": 0.5},
        {"name": "sinusoidal", "stretch": 0.9},
        {"name": "sinusoidal", "stretch": "automatic"},
        {"name": "learned", "extend": "extrapolate"},
    ],
)
def test_values_out_of_range_are_rejected(position):
    key = next(key for key in position if key != "name")
    assert key in message_of(ValidationError, lambda: ModelSettings(position=position))


LEGAL = [
    ({"name": "sinusoidal"}, {"offset": 2, "stretch": "auto", "theta": 99.0, "window": 3}),
    *(({"name": "learned"}, {"extend": extend}) for extend in ("interpolate", "repeat", "clip")),
]
ILLEGAL = [
    ({"name": "integer"}, "scale", 0.5),
    ({"name": "integer"}, "direction", "learned"),
    ({"name": "unit_interval"}, "denominator", "current"),
    ({"name": "binary"}, "max_length", 5),
    ({"name": "sine"}, "base", 7.0),
]


@pytest.mark.parametrize(("trained", "keys"), LEGAL)
def test_valid_overrides(trained, keys):
    check_override(settings_of(trained), settings_of({**trained, **keys}))


@pytest.mark.parametrize(("trained", "key", "value"), ILLEGAL)
def test_invalid_overrides(trained, key, value):
    asked = settings_of({**trained, key: value})
    text = message_of(ModelError, lambda: check_override(settings_of(trained), asked))
    assert f"model.position.{key}" in text and "window" in text


@torch.no_grad()
def test_trained_table_extends_with_another_method():
    """The weights of a model that ends at eleven serve one that does not, and agree up to there."""
    short = build("learned")
    tokens = ids(1, T)
    for extend in ("interpolate", "repeat", "clip"):
        long = build({"name": "learned", "extend": extend}, seed=9)
        long.load_state_dict(short.state_dict())
        close(
            long(tokens[:, :TRAIN], TokenPositions.plain(TRAIN)),
            short(tokens[:, :TRAIN], TokenPositions.plain(TRAIN)),
        )
        assert torch.isfinite(long(tokens, TokenPositions.plain(T))).all()
