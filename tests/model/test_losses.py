"""Loss, initialization, and the reported size of the model."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import model.loss
import model.mixers.softmax
from model import IGNORED, SCHEMES, ModelSettings, Transformer
from model.attention.kernels import attend
from tests.model.zoo import LAYERS, D, H, V, build, close, ids, settings_of

B = 4
T = 11


def targets_with_holes() -> torch.Tensor:
    targets = ids(B, T, seed=9)
    targets[0, :3] = IGNORED
    targets[2, 5] = IGNORED
    return targets


def gradients(loss: Tensor, net: Transformer) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss * 0.7, list(net.parameters()), retain_graph=True)


@pytest.mark.parametrize("z_loss", [None, 0.3])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
def test_nll_in_chunks_matches_dense_cross_entropy(
    tie_embeddings, cap, rows_at_once, z_loss, monkeypatch
):
    """The z-loss adds to gradients, not to the reported loss."""
    monkeypatch.setattr(model.loss, "LOGITS_AT_ONCE", {"cpu": rows_at_once * V})
    net = build("rope", tie_embeddings=tie_embeddings, logit_softcap=cap, logit_divisor=1.5)
    tokens = ids(B, T)
    targets = targets_with_holes()
    nll = net(tokens, targets=targets)
    assert nll.shape == (B, T)
    assert nll.dtype == torch.float64
    logits = net(tokens)
    assert cap is None or logits.abs().max() <= cap
    log_z = logits.logsumexp(-1)
    is_target = targets != IGNORED
    indices = targets.clamp(min=0)[..., None]
    chosen = logits.gather(-1, indices)[..., 0]
    dense = (log_z - chosen) * is_target
    close(nll, dense, atol=1e-12)
    total = net(tokens, targets=targets, reduction="sum", z_loss=z_loss)
    close(total, dense.sum(), atol=1e-12)
    penalty = 0.0 if z_loss is None else (z_loss * log_z**2)[is_target].sum()
    expected = gradients(dense.sum() + penalty, net)
    of_tokens = gradients(nll.sum() + penalty, net)
    for a, b, c in zip(gradients(total, net), of_tokens, expected, strict=True):
        close(a, c, atol=1e-11)
        close(b, c, atol=1e-11)


@pytest.mark.parametrize("rows_at_once", [7, 1000])
def test_summed_nll_under_autocast_has_float32_gradients(rows_at_once, monkeypatch):
    """Those of the dense loss within the precision of bfloat16."""
    monkeypatch.setattr(model.loss, "LOGITS_AT_ONCE", {"cpu": rows_at_once * V})
    net = build("rope", dtype=torch.float32)
    tokens = ids(B, T)
    targets = targets_with_holes()
    with torch.autocast("cpu", torch.bfloat16):
        total = net(tokens, targets=targets, reduction="sum")
    dense = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    (found,) = torch.autograd.grad(total, net.head.weight)
    (expected,) = torch.autograd.grad(dense, net.head.weight)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize(
    ("width", "vocab"),
    [
        (32, 512),
        (64, 32_000),
        (128, 4096),
        (512, 512),
    ],
)
@torch.no_grad()
def test_initial_loss_is_ln_v(width, vocab, tie_embeddings):
    tokens = torch.randint(vocab, (2, 258), generator=torch.Generator().manual_seed(5))
    sizes = ModelSettings(heads=4, dim=width, layers=2, tie_embeddings=tie_embeddings)
    net = Transformer(sizes, vocab, 256).initialize(seed=1)
    loss = float(net(tokens[:, :-1], targets=tokens[:, 1:]).mean())
    assert abs(loss / math.log(vocab) - 1) < 0.01


@pytest.mark.parametrize("name", SCHEMES)
def test_initialization_depends_on_the_seed_alone(name):
    def initialized(seed: int) -> dict[str, Tensor]:
        net = Transformer(settings_of({"name": name}, tie_embeddings=True), V, 11)
        before = torch.get_rng_state()
        net.initialize(seed)
        assert torch.equal(before, torch.get_rng_state())
        return net.state_dict()

    first = initialized(3)
    with torch.random.fork_rng():
        torch.manual_seed(77)
        again = initialized(3)
    other = initialized(4)
    for key, value in first.items():
        assert torch.equal(value, again[key])
        assert torch.isfinite(value).all()
        # some of a scheme's start at a constant
        if value.ndim == 2 and (value != value.flatten()[0]).any():
            assert not torch.equal(value, other[key])


def test_flops_match_torch_flop_counter(monkeypatch):
    """Over one training step on the explicit kernel, which computes the whole square of pairs."""
    monkeypatch.setattr(model.mixers.softmax, "attend", functools.partial(attend, kernel="dense"))
    net = build("none", dtype=torch.float32)
    t = 16
    tokens = ids(1, t)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
    per_key = 12 * H * D * LAYERS
    whole_square = net.flops_per_token(t) + per_key * (t - (t + 1) / 2)
    assert counter.get_total_flops() == pytest.approx(t * whole_square, rel=1e-12)
