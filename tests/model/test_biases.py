"""ALiBi and T5's buckets against transformers; distance biases under scaling, layer patterns, gradients, low
precision, overrides and invalid settings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from model import ModelError, ModelSettings, TokenPositions, Transformer, check_override
from model.attention.kernels import attend
from model.attention.mask import QUERY_BLOCK
from model.position import AttentionContext
from tests.model.pairwise import bias_of, distances, pairs_of, put, scheme_of
from tests.model.zoo import T, V, build, cached, close, ids, settings_of

LEARNED = ["alibi-learned", "t5", "kerple", "kerple-power", "kerple-log3", "fire"]


def message_of(error, call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# ALiBi


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 20])
@pytest.mark.parametrize("stretch", [1.0, 2.5])
def test_alibi_matches_huggingface_with_stretched_distances(heads, stretch):
    found = bias_of(scheme_of("alibi", heads, stretch=stretch), 9)[0]
    slopes = _get_alibi_slopes(heads, "cpu").double()[:, None, None]
    close(found, -slopes * distances(9) / stretch, atol=1e-6)
    mpt = build_mpt_alibi_tensor(heads, 9)[:, 0].double()  # for the last query
    close(found[:, -1], mpt / stretch, atol=1e-6)


def test_alibi_with_custom_slopes():
    slopes = [0.5, 0.0, 2.0]
    found = bias_of(scheme_of("alibi", 3, slopes=slopes, stretch=4.0), 5)[0]
    close(found[:, 4, 0], torch.tensor([-0.5, 0.0, -2.0], dtype=torch.float64), atol=1e-14)
    learned = scheme_of("alibi", 3, learned=True)
    # starts as the fixed ones
    close(bias_of(learned, 5), bias_of(scheme_of("alibi", 3), 5), atol=1e-7)
    close(bias_of(put(learned, slopes=slopes), 5)[0] / 4, found, atol=1e-14)


@pytest.mark.parametrize("name", ["alibi", "kerple", "sandwich"])
def test_alibi_auto_stretch_per_row(name):
    auto = scheme_of(name, stretch="auto", original=16)
    assert auto.depends_on_length and not scheme_of(name, stretch=2.0).depends_on_length
    for length, s in ((9, 1.0), (16, 1.0), (40, 2.5)):
        close(
            bias_of(auto, TokenPositions.plain(9, length=length)),
            bias_of(scheme_of(name, stretch=s), 9),
            atol=1e-13,
        )
    rows = bias_of(auto, replace(TokenPositions.plain(9), lengths=(40, 12, 64)), rows=3)
    assert rows.shape[0] == 3
    for row, s in zip(rows, (2.5, 1.0, 4.0), strict=True):
        close(row, bias_of(scheme_of(name, stretch=s), 9)[0], atol=1e-13)
    assert auto.stretches(replace(TokenPositions.plain(9), lengths=(40, 40, 40))) == (2.5,)


@pytest.mark.parametrize("case", ["alibi-auto", "kerple-power"])
@torch.no_grad()
def test_auto_stretch_equals_explicit_stretch(case):
    model = build(case)
    tokens = ids(2, T)
    keys = model.settings.position.model_dump()
    fixed = build({**keys, "stretch": 33 / 11})
    close(model(tokens, TokenPositions.plain(T, length=33)), fixed(tokens, TokenPositions.plain(T)))
    close(cached(model, tokens, [7, 1, 11], length=33), fixed(tokens, TokenPositions.plain(T)))
    assert (
        model(tokens, TokenPositions.plain(T)) - fixed(tokens, TokenPositions.plain(T))
    ).abs().max() > 1e-3


# T5

BUCKETS = [(32, 128), (32, 256), (16, 64), (20, 77), (33, 129), (2, 3), (8, 32), (64, 2048)]


def huggingface_t5(buckets: int, max_distance: int, heads: int = 6) -> T5Attention:
    config = T5Config(
        d_model=28,
        d_kv=10,
        num_heads=heads,
        is_decoder=True,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
    )
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()


def buckets_found(far: int, **keys) -> torch.Tensor:
    """(far + 1,) the bucket of each distance, from a table whose rows are numbered."""
    scheme = scheme_of("t5", 1, **keys)
    put(scheme, weight=torch.arange(scheme.settings.buckets)[:, None])
    pairs = pairs_of(scheme, TokenPositions.plain(1, offset=far), TokenPositions.plain(far + 1))
    return pairs.by_distance()[0, : far + 1].flip(0).long()


@pytest.mark.parametrize(("buckets", "max_distance"), BUCKETS)
def test_t5_buckets_match_huggingface(buckets, max_distance):
    found = buckets_found(4000, buckets=buckets, max_distance=max_distance)
    theirs = T5Attention._relative_position_bucket(
        -torch.arange(4001), bidirectional=False, num_buckets=buckets, max_distance=max_distance
    )
    assert found.tolist() == theirs.tolist()


def test_t5_bucket_boundaries_match_paper():
    found = buckets_found(200).tolist()
    first = {bucket: found.index(bucket) for bucket in range(32)}
    assert [first[b] for b in range(17)] == list(range(17))
    assert [first[b] for b in range(17, 32)] == [
        19,
        21,
        24,
        27,
        31,
        35,
        40,
        46,
        52,
        59,
        67,
        77,
        87,
        99,
        113,
    ]
    assert found[-1] == 31


@pytest.mark.parametrize(("queries", "past"), [(9, 0), (4, 30), (1, 200)])
def test_t5_biases_match_huggingface(queries, past):
    theirs = huggingface_t5(32, 128)
    ours = scheme_of("t5")
    table = theirs.relative_attention_bias.weight.detach()
    put(ours, weight=table)
    keys = past + queries
    pairs = pairs_of(ours, TokenPositions.plain(queries, offset=past), TokenPositions.plain(keys))
    found = pairs.bias(*pairs.indices(0, queries, slice(0, keys)))
    expected = theirs.compute_bias(queries, keys, past_seen_tokens=past)
    assert found.shape == expected.shape == (1, 6, queries, keys)
    close(found, expected.detach(), atol=0)  # keys ahead have the bias of distance 0 in both


@torch.no_grad()
def test_t5_without_scale_uses_unscaled_dot_products():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 5, 10, generator=generator, dtype=torch.float64) for _ in range(3))
    scheme = scheme_of("t5", unscaled=True)
    positions = TokenPositions.plain(5)
    context = AttentionContext(
        positions,
        positions,
        positions,
        1,
        6,
        torch.device("cpu"),
        scheme.tables(positions, torch.float64),
    )
    found = attend(scheme.plan(context).read(q, k), v, 10**-0.5)
    weight = scheme.get_parameter("weight")
    n = torch.arange(5)
    # distances 0 to 4 have a row each
    table = weight[(n[:, None] - n).clamp(min=0)].permute(2, 0, 1)
    logits = q @ k.transpose(-1, -2) + table
    close(found, logits.masked_fill(n > n[:, None], -math.inf).softmax(-1) @ v, atol=1e-12)


def test_t5_initialization_and_real_positions():
    weight = scheme_of("t5", heads=400).get_parameter("weight")
    assert float(weight.detach().std() * 28**0.5) == pytest.approx(1.0, abs=0.02)
    model = build("t5")
    positions = TokenPositions.plain(T)
    positions = replace(positions, position=positions.position / 2, unit_steps=False)
    assert "integer positions" in message_of(ModelError, lambda: model(ids(1, T), positions))


# What they share


@pytest.mark.parametrize("case", LEARNED)
@pytest.mark.parametrize("tokens", [19, QUERY_BLOCK + 45])
def test_blockwise_gradients_of_learned_biases_match_reference(case, tokens):
    """Also over several blocks of queries, which are recomputed backwards."""
    scheme = build(case).position[
        "all" if case not in ("alibi-learned", "kerple-log3", "fire") else "all-0"
    ]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 6, tokens, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    weights = dict(scheme.named_parameters())
    found = {}
    for kernel in ("dense", "blocks"):
        positions = TokenPositions.plain(tokens)
        context = AttentionContext(
            positions,
            positions,
            positions,
            1,
            6,
            torch.device("cpu"),
            scheme.tables(positions, torch.float64),
        )
        views = scheme.plan(context).read(q, k)
        loss = (attend(views, v, 0.5, kernel) * v.flip(2)).sum()
        found[kernel] = torch.autograd.grad(loss, list(weights.values()))
    for name, a, b in zip(weights, *found.values(), strict=True):
        assert a.abs().max() > 1e-3, name
        close(a, b, atol=1e-9 * max(1.0, float(a.abs().max())))


@pytest.mark.parametrize("case", ["alibi-learned", "t5", "kerple-power", "kerple-log3", "fire"])
def test_learned_biases_stay_float32_under_autocast(case):
    scheme = next(iter(build(case, dtype=torch.float32).position.values()))
    positions = TokenPositions.plain(T, offset=4000)
    context = AttentionContext(
        positions,
        positions,
        positions,
        1,
        6,
        torch.device("cpu"),
        scheme.tables(positions, torch.float32),
    )
    q = torch.zeros(1, 6, T, 4)

    def found():
        pairs = scheme.plan(context).read(q, q)[0].mask
        return pairs.bias(*pairs.indices(0, T, slice(0, T)))

    with torch.autocast("cpu", torch.bfloat16):
        half = found()
    assert half.dtype == torch.float32
    close(half, found(), atol=0)


@pytest.mark.parametrize(
    ("name", "keys", "per_layer"),
    [
        ("alibi", {}, False),
        ("alibi", {"shared": False}, False),  # nothing is learned
        ("alibi", {"learned": True}, False),
        ("alibi", {"learned": True, "shared": False}, True),
        ("t5", {}, False),
        ("t5", {"shared": False}, True),
        ("kerple", {}, False),
        ("kerple", {"shared": False}, True),
        ("fire", {"shared": True}, False),
        ("fire", {}, True),
    ],
)
def test_learned_parameters_are_shared_or_per_layer(name, keys, per_layer):
    model = build({"name": name, **keys})
    assert len(model.position) == (3 if per_layer else 1)


@pytest.mark.parametrize(
    ("position", "words"),
    [
        ({"name": "alibi", "stretch": 0.5}, "greater than or equal to 1"),
        ({"name": "alibi", "stretch": "matched"}, "'auto'"),
        ({"name": "alibi", "slopes": [0.5, -0.5]}, "greater than or equal to 0"),
        ({"name": "alibi", "slopes": [0.5] * 8, "learned": True}, "slopes"),
        ({"name": "t5", "max_distance": 16}, "must exceed 16"),
        ({"name": "t5", "buckets": 1}, "greater than or equal to 2"),
        ({"name": "kerple", "form": "linear"}, "'log3'"),
        ({"name": "sandwich", "dims": 7}, "multiple of 2"),
        ({"name": "fire", "width": 0}, "greater than or equal to 1"),
        ({"name": "fire", "threshold": 0}, "greater than 0"),
        ({"name": "fire", "init_scale": 0}, "greater than 0"),
        ({"name": "fire", "init_length": math.inf}, "finite"),
        ({"name": "fire", "stretch": 2}, "not permitted"),
    ],
)
def test_invalid_options_are_named(position, words):
    text = message_of(ValidationError, lambda: ModelSettings(position=position))
    assert words in text and f"position.{position['name']}" in text


def test_slopes_must_match_number_of_heads():
    def made():
        Transformer(ModelSettings(position={"name": "alibi", "slopes": [0.5, 0.25]}), V, 16)

    text = message_of(ModelError, made)
    assert "model.position.slopes" in text and "(8)" in text and "got 2" in text


OVERRIDES = [
    ("alibi", {}, {"stretch": "auto"}),
    ("alibi", {}, {"slopes": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}),
    ("alibi", {"learned": True}, {"stretch": 2.0}),
    ("t5", {}, {"max_distance": 40}),
    ("kerple", {"shared": False}, {"stretch": 2.0}),
    ("sandwich", {}, {"stretch": 2.0}),
    ("fire", {}, {"threshold": 5.0}),
]


@pytest.mark.parametrize(("name", "keys", "more"), OVERRIDES)
@torch.no_grad()
def test_valid_overrides_keep_weights_and_change_outputs(name, keys, more):
    old = {"name": name, **keys}
    new = {"name": name, **keys, **more}
    check_override(settings_of(old), settings_of(new))
    trained = build(old)
    other = build(new, seed=5)
    other.load_state_dict(trained.state_dict())
    tokens = ids(1, 40)
    positions = TokenPositions.plain(40)
    assert (trained(tokens, positions) - other(tokens, positions)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("alibi", "learned", True),
        ("t5", "buckets", 16),
        ("t5", "unscaled", True),
        ("kerple", "form", "power"),
        ("sandwich", "dims", 64),
        ("fire", "init_length", 5.0),
        ("fire", "shared", True),
    ],
)
def test_trained_settings_cannot_be_overridden(name, key, value):
    old = settings_of({"name": name})
    new = settings_of({"name": name, key: value})
    assert f"model.position.{key} cannot" in message_of(
        ModelError, lambda: check_override(old, new)
    )
