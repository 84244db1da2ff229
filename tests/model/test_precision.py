"""Accuracy at long positions and in low precision."""

import copy
import math

import pytest
import torch

from model.block import RMSNorm
from tests.model.zoo import (
    CASES,
    MIXER_CASES,
    D,
    T,
    build,
    close,
    each_mechanism,
    every_case,
    ids,
    reach_of,
    shifted,
)

FAR = 1_000_000


@pytest.mark.parametrize(
    "case", ["rope", "rope-interleaved", "sinusoidal", "alibi", "rope-yarn-wavelength"]
)
@torch.no_grad()
def test_float32_at_a_million_is_as_accurate_as_at_zero(case):
    model = build(case)
    single = build(case, dtype=torch.float32)
    tokens = ids(2, T)
    for start in (0, FAR):
        exact = model(tokens, shifted(T, start))
        close(single(tokens, shifted(T, start)).double(), exact, atol=2e-5)


def test_angles_at_a_million_against_exact_arithmetic():
    """math.cos reduces its argument exactly; float32 angles would be wrong by 4e-2 here."""
    rope = build("rope").position["all"]
    cos, sin = rope.tables(shifted(1, FAR), torch.float32)
    for k in range(D // 2):
        angle = FAR * 10_000.0 ** (-2 * k / D)
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
        positions = shifted(length, start)
        out = half(tokens, positions)
        assert out.dtype == torch.bfloat16
        off = (out.double() - exact(tokens, positions)).abs()
        assert off.mean() < 0.03, start
        assert off.max() < 0.3, start


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


@each_mechanism([*CASES, *MIXER_CASES])
def test_residual_stream_has_the_dtype_of_autocast(case):
    model = build(case, dtype=torch.float32).train()
    model.casts_residual = True
    dtypes = set()
    for block in model.layers:
        block.register_forward_hook(lambda block, args, x: dtypes.add((args[0].dtype, x.dtype)))
    length = min(9, reach_of(model))
    tokens = ids(2, length)
    exact = model(tokens, targets=tokens.flip(1)).mean()
    assert dtypes == {(torch.float32, torch.float32)}
    dtypes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        nll = model(tokens, targets=tokens.flip(1))
    nll.mean().backward()
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert nll.dtype == torch.float32
    assert nll.mean().item() == pytest.approx(exact.item(), abs=0.1)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_norm_of_a_narrow_stream_is_computed_in_float32():
    """The weights are halfway between two numbers of bfloat16."""
    norm = RMSNorm(512)
    torch.nn.init.constant_(norm.weight, 1 + 2.0**-8)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()
    exact *= 1 + 2.0**-8
    assert norm(x).dtype == torch.bfloat16
    assert (norm(x) == exact.bfloat16()).double().mean() > 0.99
