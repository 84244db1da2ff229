"""ALiBi and T5's buckets against transformers; distance biases under scaling, layer patterns,
gradients, low precision, overrides and invalid settings."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from model import TokenPositions
from model.attention.kernels import attend
from model.position import AttentionContext
from tests.model.pairwise import bias_of, distances, pairs_of, put, scheme_of
from tests.model.zoo import T, build, close

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


# What they share


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
