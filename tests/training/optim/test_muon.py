"""Muon's update against a float64 reference and the polar factor; Muon and AdamW as one
optimizer."""

import numpy as np
import torch

from run_directory.optimizer_settings import AdamWBase, AdamWSettings, MuonSettings
from tests.processes import together
from tests.training.distributed import sharded_updates
from tests.training.net import Net
from training.optim.optimizer import make_optimizer, parameters_at_rate, set_learning_rates

# Five steps in bfloat16, whose numbers are good to 0.4%, against float64: in Frobenius norm, small
# singular values of a square matrix among them.
TOLERANCE = 0.06


def newton_schulz(gradient, iterations=5):
    """X ← aX + bXXᵀX + c(XXᵀ)²X from X = G / ‖G‖ (Jordan 2024), in float64."""
    x = gradient / np.linalg.norm(gradient)
    for _ in range(iterations):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x


def test_updates_match_reference():
    settings = MuonSettings(lr=0.5, weight_decay=0.2, adamw=AdamWBase(weight_decay=0.3))
    net = Net(dim=14, tie_embeddings=False)
    generator = torch.Generator().manual_seed(1)
    optimizer = make_optimizer(net, settings)
    other = Net(dim=14, tie_embeddings=False)
    other.load_state_dict(net.state_dict())
    adamw = make_optimizer(other, AdamWSettings(weight_decay=0.3))
    weight = net.mix.weight.detach().double().numpy().copy()
    mean = np.zeros_like(weight)
    moved = 0.0
    for step in range(3):
        rates = {"lr": 0.5 - 0.1 * step, "adamw_lr": 0.01 * (step + 1)}
        set_learning_rates(optimizer, rates)
        set_learning_rates(adamw, {"lr": rates["adamw_lr"]})
        for one, twin in zip(net.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            twin.grad = one.grad.clone()
        gradient = net.mix.weight.grad.double().numpy()
        optimizer.step()
        adamw.step()
        mean = 0.95 * mean + 0.05 * gradient
        update = newton_schulz(0.05 * gradient + 0.95 * mean)
        update *= 0.2 * 14**0.5
        weight = weight * (1 - rates["lr"] * 0.2) - rates["lr"] * update
        moved += rates["lr"] * np.linalg.norm(update)
        assert np.linalg.norm(net.mix.weight.detach().numpy() - weight) < TOLERANCE * moved
    for (name, one), twin in zip(net.named_parameters(), other.parameters(), strict=True):
        assert one.equal(twin) == (name != "mix.weight"), name


def test_parameter_groups_and_learning_rates():
    settings = MuonSettings(lr=0.5, adamw=AdamWBase(lr=0.25, groups={"positions": {"lr": 0.125}}))
    optimizer = make_optimizer(Net(tie_embeddings=False), settings)
    assert [
        (group["name"], group["rate"], group["weight_decay"]) for group in optimizer.param_groups
    ] == [
        ("matrices", "lr", 0.1),
        ("head", "adamw_lr", 0.1),
        ("embeddings", "adamw_lr", 0.0),
        ("vectors", "adamw_lr", 0.0),
        ("positions", "positions_lr", 0.0),
    ]
    assert settings.rates == {"lr": 0.5, "adamw_lr": 0.25, "positions_lr": 0.125}
    assert [group.get("fused") for group in optimizer.param_groups] == [None, *[True] * 4]
    message = {
        rate: parameters_at_rate(rate, Net(tie_embeddings=False), settings)
        for rate in settings.rates
    }
    assert message == {
        "lr": "for 36 parameters: matrices",
        "adamw_lr": "for 144 parameters: head, embeddings, vectors",
        "positions_lr": "for 54 positional parameters",
    }
    net = Net()
    net.mix.weight.requires_grad_(False)
    assert "matrices" not in [group["name"] for group in make_optimizer(net, settings).param_groups]


def test_load_state_dict_updates_both_optimizers():
    nets = [Net(), Net()]
    first, second = (make_optimizer(net, MuonSettings()) for net in nets)
    for weight in nets[0].parameters():
        weight.grad = torch.ones_like(weight)
    first.step()
    second.load_state_dict(first.state_dict())
    for part, groups in zip(
        second.parts, (second.param_groups[:1], second.param_groups[1:]), strict=True
    ):
        assert part.state is second.state and all(
            a is b for a, b in zip(part.param_groups, groups, strict=True)
        )
    assert len(second.state) == 5 and set(second.state[nets[1].mix.weight]) == {"momentum_buffer"}


def test_sharded_updates_match_unsharded_with_skipped_steps():
    """Muon's five steps in bfloat16 round otherwise where the products are summed over two
    processes."""
    found, _ = together(2, sharded_updates.compare)
    for name, tolerance in (("adamw", 1e-6), ("muon", TOLERANCE)):
        worst, moved = found[name]
        rounding = 2.0**-23  # of weights near 1: blocks of a sharded weight are aligned otherwise
        assert moved > 0.01 and worst < max(tolerance * moved, rounding), (name, worst, moved)
