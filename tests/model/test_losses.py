"""Loss, initialization, and the reported size of the model."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import model.attention.softmax
import model.loss
from model import IGNORED, SCHEMES, ModelSettings, TokenPositions, Transformer
from model.attention.kernels import attend
from tests.model.zoo import C, D, G, H, V, build, close, ids, settings_of

B = 4
T = 11


def targets_with_holes() -> torch.Tensor:
    targets = ids(B, T, seed=9)
    targets[0, :3] = IGNORED
    targets[2, 5] = IGNORED
    return targets


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
def test_nll_in_chunks_matches_dense_cross_entropy(tie_embeddings, cap, rows_at_once, monkeypatch):
    monkeypatch.setattr(model.loss, "LOGITS_AT_ONCE", {"cpu": rows_at_once * V})
    net = build("rope", tie_embeddings=tie_embeddings, logit_softcap=cap, logit_divisor=1.5)
    tokens = ids(B, T)
    targets = targets_with_holes()
    nll = net(tokens, TokenPositions.plain(T), targets=targets)
    assert nll.shape == (B, T) and nll.dtype == torch.float64
    assert (nll[targets == IGNORED] == 0).all() and (nll[targets != IGNORED] > 0).all()
    of_tokens = torch.autograd.grad(nll.sum() * 0.7, list(net.parameters()))
    total = net(tokens, TokenPositions.plain(T), targets=targets, reduction="sum")
    close(total, nll.sum(), atol=1e-12)
    found = torch.autograd.grad(total * 0.7, list(net.parameters()))

    logits = net(tokens, TokenPositions.plain(T))
    if cap is not None:
        assert logits.abs().max() <= cap
    dense = logits.logsumexp(-1) - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    dense = dense * (targets != IGNORED)
    close(nll, dense, atol=1e-12)
    expected = torch.autograd.grad(dense.sum() * 0.7, list(net.parameters()))
    for a, b, c in zip(found, of_tokens, expected, strict=True):
        close(a, c, atol=1e-11)
        close(b, c, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_summed_nll_under_autocast_is_close_to_float32(dtype, monkeypatch):
    monkeypatch.setattr(model.loss, "LOGITS_AT_ONCE", {"cpu": 7 * V})
    net = build("rope", dtype=torch.float32)
    tokens = ids(B, T)
    positions = TokenPositions.plain(T)
    exact = net(tokens, positions, targets=targets_with_holes()).sum()
    expected = torch.autograd.grad(exact, net.output_head.weight)[0]
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        total = net(tokens, positions, targets=targets_with_holes(), reduction="sum")
    found = torch.autograd.grad(total, net.output_head.weight)[0]
    near = 1e-5 if dtype == torch.float32 else 0.03
    assert total.dtype == found.dtype == torch.float32
    assert (
        abs(total - exact) <= near * exact and (found - expected).norm() <= near * expected.norm()
    )


def first_loss(tokens: torch.Tensor, vocab: int, **keys) -> float:
    net = Transformer(ModelSettings(heads=4, **keys), vocab, 256).initialize(seed=1)
    length = tokens.shape[1] - 1
    with torch.no_grad():
        return float(
            net(tokens[:, :-1], TokenPositions.plain(length), targets=tokens[:, 1:]).mean()
        )


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize(
    ("width", "vocab"), [(32, 512), (64, 512), (64, 32_000), (128, 4096), (256, 512), (1024, 512)]
)
def test_initial_loss_is_ln_v(width, vocab, tie_embeddings):
    tokens = torch.randint(vocab, (2, 258), generator=torch.Generator().manual_seed(5))
    loss = first_loss(tokens, vocab, dim=width, layers=2, tie_embeddings=tie_embeddings)
    assert abs(loss / math.log(vocab) - 1) < 0.01


@pytest.mark.parametrize("name", SCHEMES)
def test_initialization_depends_on_seed(name):
    def drawn(seed):
        net = Transformer(settings_of({"name": name}, tie_embeddings=True), V, 11)
        torch.manual_seed(seed * 1000 + 77)  # the global generator plays no part
        return net.initialize(seed).state_dict()

    first = drawn(3)
    torch_state = torch.get_rng_state()
    again = drawn(3)
    other = drawn(4)
    torch.set_rng_state(torch_state)
    for key, value in first.items():
        assert torch.equal(value, again[key]) and torch.isfinite(value).all()
        # some of a scheme's start at a constant
        if value.ndim == 2 and (value != value.flatten()[0]).any():
            assert not torch.equal(value, other[key])


def test_initialization_keeps_global_rng_state():
    net = Transformer(settings_of({"name": "learned"}), V, 11)
    before = torch.get_rng_state()
    net.initialize(0)
    assert torch.equal(before, torch.get_rng_state())


HIDDEN = 43
LAYERS = 3


def by_hand(tie_embeddings: bool, table: int = 0, qk_norm: bool = False) -> int:
    attention = C * H * D + 2 * C * G * D + H * D * C + (2 * D if qk_norm else 0)
    block = 2 * C + attention + 3 * C * HIDDEN
    return V * C * (1 if tie_embeddings else 2) + LAYERS * block + C + table * C


def test_parameter_count():
    for tie_embeddings in (False, True):
        assert build("rope", tie_embeddings=tie_embeddings).parameter_count() == by_hand(
            tie_embeddings
        )
    assert build("rope", qk_norm=True).parameter_count() == by_hand(False, qk_norm=True)
    assert build("learned").parameter_count() == by_hand(False, table=11)
    assert build("learned-long").parameter_count() == by_hand(False, table=61)


def test_flops_match_torch_flop_counter(monkeypatch):
    """Over one training step on the explicit kernel, which computes the whole square of pairs."""
    monkeypatch.setattr(
        model.attention.softmax, "attend", functools.partial(attend, kernel="dense")
    )
    net = build("none", dtype=torch.float32)
    t = 16
    tokens = ids(1, t)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(
            net(tokens, TokenPositions.plain(t)).flatten(0, 1), tokens.flatten()
        ).backward()
    per_key = 12 * H * D * LAYERS
    whole_square = net.flops_per_token(t) + per_key * (t - (t + 1) / 2)
    assert counter.get_total_flops() == pytest.approx(t * whole_square, rel=1e-12)


@pytest.mark.parametrize("rows_at_once", [3, 1000])
def test_z_loss_affects_gradients_not_reported_loss(rows_at_once, monkeypatch):
    monkeypatch.setattr(model.loss, "LOGITS_AT_ONCE", {"cpu": rows_at_once * V})
    net = build("rope", logit_softcap=3.0)
    tokens = ids(B, T)
    targets = targets_with_holes()
    positions = TokenPositions.plain(T)
    weights = list(net.parameters())
    total = net(tokens, positions, targets=targets, reduction="sum", z_loss=0.3)
    plain = net(tokens, positions, targets=targets, reduction="sum")
    assert total.equal(plain)
    found = torch.autograd.grad(total, weights)

    log_z = net(tokens, positions).logsumexp(-1)
    penalty = (0.3 * log_z**2)[targets != IGNORED].sum()
    expected = torch.autograd.grad(plain + penalty, weights)
    without = torch.autograd.grad(net(tokens, positions, targets=targets, reduction="sum"), weights)
    for a, b in zip(found, expected, strict=True):
        close(a, b, atol=1e-11)
    assert max((a - b).abs().max() for a, b in zip(expected, without, strict=True)) > 0.1
