"""Attention statistics against hand-computed cases and brute force; repetition and drift against
loops."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from evaluation.diagnostics.attention import bucket_edges, record_attention
from evaluation.diagnostics.generation import by_bucket, repeated_runs
from model import TokenPositions
from model.attention.kernels import attention_details
from tests.model.zoo import T, build, ids, reach_of

L0 = 8
KEEP = 4


def record(model, tokens):
    edges = bucket_edges(tokens.shape[1], L0)
    return record_attention(model, tokens, KEEP, chunk=5, edges=edges, trained_length=L0)


def brute(model, tokens):
    """Weights and logits (B, H, KEEP, L) of each layer over all keys by one pass without a cache,
    placed by position."""
    length = tokens.shape[1]
    full = []

    def note(views, v, scale, normalizer, out):
        details = attention_details(views, v, scale, normalizer, 0, length, whole=True, logits=True)
        torch.testing.assert_close(details.output, out, atol=1e-10, rtol=0)
        weights = details.weights[:, :, -KEEP:]
        logits = details.logits[:, :, -KEEP:]
        full.append((weights, logits))

    with torch.no_grad():
        model(tokens, TokenPositions.plain(length), hooks=[note] * len(model.layers))
    return full


@pytest.mark.parametrize(
    "case",
    [
        "rope",
        "rope-yarn-auto",
        "rope-sinks",
        "alibi-window",
        "none-ssmax",
        "rope-self-extend",
        "shaw-values",
        "stick_breaking",
        "pattern-alibi",
        "kerple-log3",
        "fox",
        "path",
        "cope",
        "xpos",
    ],
)
def test_measures_match_loops_without_cache(case):
    model = build(case)
    tokens = ids(2, reach_of(model, T))
    sample = record(model, tokens)
    length = tokens.shape[1]
    edges = bucket_edges(length, L0)
    for layer, (weights, logits) in enumerate(brute(model, tokens)):
        for row, head in product(range(2), range(weights.shape[1])):
            by_query = []
            mass = np.zeros(len(edges) - 1)
            for i, query in enumerate(range(length - KEEP, length)):
                w = weights[row, head, i, : query + 1].numpy()
                z = logits[row, head, i, : query + 1].numpy()
                keys = int(((w > 0) | np.isfinite(z)).sum())
                z = z[np.isfinite(z)]
                p = w / w.sum()
                distance = query - np.arange(query + 1)
                mass += np.histogram(distance, edges, weights=w)[0] / KEEP
                reach = 1
                while p[distance < reach].sum() < 0.9 - 1e-9:
                    reach += 1
                by_query.append(
                    {
                        "entropy": stats.entropy(p),
                        "entropy_relative": stats.entropy(p) / math.log(keys),
                        "first_token": w[0],
                        "mass_beyond": w[distance >= L0].sum(),
                        "logit_std": z.std(),
                        "logit_max": z.max(),
                        "reach_90": reach,
                    }
                )
            for name in by_query[0]:
                value = float(sample[name][row, layer, head])
                mean = np.mean([measures[name] for measures in by_query])
                assert value == pytest.approx(mean, abs=1e-9, nan_ok=True), name
            found = sample["by_distance"][row, layer, head]
            np.testing.assert_allclose(found, mass, atol=1e-10)


def test_repetition_matches_loops():
    tokens = np.random.default_rng(4).integers(0, 3, size=(5, 60))
    runs = repeated_runs(tokens, 7)
    for row in range(5):
        for t in range(60):
            expected = 0
            for back in range(1, min(7, t) + 1):
                n = 0
                while t - back - n >= 0 and tokens[row, t - n] == tokens[row, t - back - n]:
                    n += 1
                expected = max(expected, n)
            assert runs[row, t] == expected
    assert repeated_runs(np.array([[5, 5, 5, 5]]), 3).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (10, {"repeated_4": 2 / 5, "distinct_1": 1.0, "longest_run": 5.0, "nll": 7.0}),
        (9, {"repeated_4": 1 / 4, "distinct_1": 1.0, "longest_run": 4.0, "nll": 6.5}),
        (6, {"repeated_4": 0.0, "distinct_1": 1.0, "longest_run": 1.0, "nll": 5.0}),
    ],
)
def test_measures_of_a_bucket_by_hand(end, expected):
    """Five tokens that repeat the prompt: runs of 1 to 5, and the NLL of a token is its index."""
    tokens = np.tile(np.arange(5), 2)[None]
    found = by_bucket(tokens, np.array([end]), np.arange(10.0)[None], [5, 10])
    assert {name: float(values[0, 0]) for name, values in found.items()} == expected
