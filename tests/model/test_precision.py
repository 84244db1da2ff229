"""Accuracy at long positions and in low precision."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from model import TokenPositions
from model.attention.kernels import attend
from model.attention.mask import AttentionMask, AttentionView, BiasForms, CausalBand
from model.position.table import LookupTable
from tests.model.zoo import T, build, close, every_case, ids, reach_of, schemes_of

FAR = 1_000_000


def far_places(tokens: int, start: int) -> TokenPositions:
    here = TokenPositions.plain(tokens)
    return replace(here, position=here.position + start, position_end=start + tokens)


@pytest.mark.parametrize(
    "case", ["rope", "rope-interleaved", "sinusoidal", "alibi", "rope-yarn-wavelength"]
)
@torch.no_grad()
def test_float32_at_a_million_is_as_accurate_as_at_zero(case):
    model = build(case)
    single = build(case, dtype=torch.float32)
    tokens = ids(2, T)
    for start in (0, FAR):
        exact = model(tokens, far_places(T, start))
        close(single(tokens, far_places(T, start)).double(), exact, atol=2e-5)


def test_angles_at_a_million_against_exact_arithmetic():
    """math.cos reduces its argument exactly; float32 angles would be wrong by 4e-2 here."""
    (rope,) = schemes_of(build("rope"))
    cos, sin = rope.tables(far_places(1, FAR), torch.float32)
    for k in range(cos.shape[-1]):
        angle = FAR * 10_000.0 ** (-2 * k / (2 * cos.shape[-1]))
        assert float(cos[0, 0, k]) == pytest.approx(math.cos(angle), abs=1e-7)
        assert float(sin[0, 0, k]) == pytest.approx(math.sin(angle), abs=1e-7)


@every_case
@torch.no_grad()
def test_bfloat16_model_matches_float64_at_large_positions(case):
    """Weights rounded once on both sides; what is left is the rounding of activations, near and far
    alike."""
    half = build(case, dtype=torch.bfloat16)
    exact = copy.deepcopy(half).double()
    length = reach_of(half)
    tokens = ids(2, length)
    for start in (0, 4096) if half.limit is None else (0,):
        positions = far_places(length, start)
        out = half(tokens, positions)
        assert out.dtype == torch.bfloat16
        off = (out.double() - exact(tokens, positions)).abs()
        assert off.mean() < 0.03 and off.max() < 0.3, (
            f"at {start}: mean {off.mean():.3f}, max {off.max():.3f}"
        )


@pytest.mark.parametrize("case", ["rope", "alibi", "learned", "sinusoidal", "rope-window"])
def test_autocast_loss_is_float32_and_close(case):
    model = build(case, dtype=torch.float32)
    tokens = ids(2, 11)
    exact = model(tokens, targets=tokens.flip(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets=tokens.flip(1))
    assert loss.dtype == torch.float32
    close(loss.detach(), exact.detach(), atol=0.3)
    loss.mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("layout", ["distance", "elementwise"])
def test_autocast_distinguishes_large_distances(layout):
    queries = 1
    keys = 700
    band = CausalBand(keys - queries) if layout == "distance" else None

    def bias(b, h, i, j):
        return (i + keys - queries - j) * -1.0

    def by_distance(h, d):
        return torch.where((d >= 511) & (d <= 514), -1.0 * d, -1e9)

    pairs = AttentionMask(
        batch=1,
        heads=1,
        queries=queries,
        keys=keys,
        device=torch.device("cpu"),
        # The keys 511 to 514 back: bfloat16 holds every fourth number there.
        mask_mod=lambda b, h, i, j: (keys - 1 - j >= 511) & (keys - 1 - j <= 514),
        separation=lambda b, i, j: i + keys - queries - j,
        bias=bias,
        band=band,
        is_band=band is not None,
        forms=BiasForms(distance=by_distance if layout == "distance" else None),
        unit_steps=layout == "distance",
    )
    zeros = torch.zeros(1, 1, keys, 8, dtype=torch.bfloat16)
    v = zeros.clone()
    # feature n tells the weight of 511 + n
    v[0, 0, [keys - 1 - d for d in range(511, 515)], range(4)] = 1.0
    with torch.autocast("cpu", torch.bfloat16):
        out = attend([AttentionView(zeros[:, :, :queries], zeros, pairs)], v, 1.0, "blocks")
    expected = torch.tensor([0.0, -1.0, -2.0, -3.0]).softmax(0)
    close(out[0, 0, 0, :4].float(), expected, atol=5e-3)


def test_table_growth_keeps_existing_rows():
    table = LookupTable(lambda n: (n[..., None] * torch.tensor([1.0, 0.5], dtype=torch.float64),))
    here = torch.tensor([[3, 0]])
    (first,) = table.look_up(here, 4, torch.float64)
    (far,) = table.look_up(torch.tensor([[4999]]), 5000, torch.float64)
    (again,) = table.look_up(here, 4, torch.float64)
    close(first, torch.tensor([[[3.0, 1.5], [0.0, 0.0]]], dtype=torch.float64), atol=0)
    close(far, torch.tensor([[[4999.0, 2499.5]]], dtype=torch.float64), atol=0)
    close(again, first, atol=0)
    with pytest.raises(IndexError):
        table.look_up(torch.tensor([[10**6]]), 4, torch.float64)
