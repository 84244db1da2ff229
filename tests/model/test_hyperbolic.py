"""Hyperbolic rotation against its matrix of cosh and sinh, and against a decay per feature."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from model import TokenPositions
from tests.model.dense_remap import B, D, drawn
from tests.model.rotated import (
    THETA,
    answers,
    distances,
    made,
    pair_of,
    spelled_out,
    through,
)
from tests.model.zoo import close, packed


def decays(q, k, d, fastest: float, margin: float) -> torch.Tensor:
    """(B, H, T, T) Σ_k e^(−(θ' − θ_k)d) u_q u_k + e^(−(θ' + θ_k)d) w_q w_k."""
    damping = fastest * (1 + margin)

    def score(q, k, group, pair):
        theta = fastest * THETA ** (-2 * pair / D)
        (a, b) = pair_of(pair, "half")
        total = 0.0
        for sign in (1, -1):
            q_part, k_part = ((x[..., a] + sign * x[..., b]) / math.sqrt(2) for x in (q, k))
            total = (
                total
                + (-(damping - sign * theta) * d).exp() * q_part[..., None] * k_part[..., None, :]
            )
        return total

    return spelled_out(q, k, score)


def test_hyperbolic_hope_is_a_decay_of_each_channel():
    """Dai et al.'s matrix of cosh and sinh, pair by pair as printed, is a decay of u and of w."""
    (q, k, v), d = drawn(21), distances(list(range(21)))
    damping = 0.7 * (1 + 0.3)

    def printed(q, k, group, pair):
        theta = 0.7 * THETA ** (-2 * pair / D)
        (a, b) = pair_of(pair, "half")
        cosh = (d * theta).cosh()
        sinh = (d * theta).sinh()
        qa = q[..., a, None]
        qb = q[..., b, None]
        ka = k[..., None, :, a]
        kb = k[..., None, :, b]
        return (-d * damping).exp() * (qa * (cosh * ka + sinh * kb) + qb * (sinh * ka + cosh * kb))

    scores = spelled_out(q, k, printed)
    close(scores.tril(), decays(q, k, d, 0.7, 0.3).tril(), atol=1e-12)
    scheme = made("hyperbolic", fastest=0.7, margin=0.3)
    for kernel in ("auto", "dense"):
        close(
            through(scheme, TokenPositions.plain(21), q, k, v, kernel),
            answers(scores, v),
            atol=1e-12,
        )


def test_hyperbolic_documents_at_any_offset():
    """Documents of one row at positions thousands apart, in both directions: their keys never meet,
    neither in the answers nor in the gradients, where a factor without bound of a hidden pair would
    leave 0·∞."""
    positions = packed([[3, 18, 5, 11], [20, 17]])
    tensors = drawn(37)
    starts = [[0.5, 4000.0, 9000.0, 20.0], [0.0, 7000.0]]
    offsets = torch.stack([torch.tensor(starts[r])[positions.document[r]] for r in range(B)])
    positions = replace(positions, position=positions.position + offsets, position_end=9006)
    seen = (positions.document[:, :, None] == positions.document[:, None, :]) & torch.ones(
        37, 37
    ).tril().bool()
    scheme = made("hyperbolic", fastest=0.9, margin=0.1)

    def dense(q, k, v):
        rows = []
        for r in range(B):
            d = distances(positions.position[r].tolist()) * seen[r]
            rows.append(decays(q[r : r + 1], k[r : r + 1], d, 0.9, 0.1))
        return answers(torch.cat(rows), v, seen[:, None])

    results = []
    for answer in (dense, lambda q, k, v: through(scheme, positions, q, k, v)):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        out = answer(q, k, v)
        out.square().sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for expected, found in zip(*results, strict=True):
        close(found, expected, atol=1e-11)


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("window", [None, 40, 7])
def test_hyperbolic_across_kernel_blocks_with_window_and_sinks(window, layout):
    """Past QUERY_BLOCK keys come as a range, as sinks and a range, or in packed rows all at once.
    Positions are 30 apart: a key of a block's own queries taken for an earlier one would
    overflow."""
    count = 300
    (q, k, v), n = drawn(count), torch.arange(count)
    scheme = made(
        "hyperbolic", fastest=2.0, margin=1e-4, window=window, sinks=0 if window is None else 3
    )
    positions = TokenPositions.plain(count) if layout == "plain" else packed([[count], [count]])
    positions = replace(
        positions, position=positions.position * 30, position_end=30 * count, unit_steps=False
    )
    back = n[:, None] - n[None, :]
    seen = (back >= 0) & ((back < (window or count)) | (n < 3))
    expected = answers(decays(q, k, distances((30 * n).tolist()), 2.0, 1e-4), v, seen)
    close(through(scheme, positions, q, k, v), expected, atol=1e-11)
