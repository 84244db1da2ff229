"""Parameter groups, weight decay, state names, and one update by hand."""

from contextlib import nullcontext

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from errors import TrainingError
from model import ModelSettings, Transformer
from run_directory.optimizer_settings import ROLES, AdamWSettings
from run_directory.weights import clean_name, named_weights
from tests.training.net import Net
from training.optim.combined import CombinedOptimizer
from training.optim.optimizer import (
    guarded_step,
    make_optimizer,
    set_learning_rates,
)


def roles(model):
    optimizer = make_optimizer(model, AdamWSettings(weight_decay=0.3))
    return {
        group["name"]: (group["names"], group["weight_decay"]) for group in optimizer.param_groups
    }


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_roles_of_the_real_model(tie_embeddings):
    settings = ModelSettings(
        dim=12,
        layers=2,
        heads=2,
        tie_embeddings=tie_embeddings,
        qk_norm=True,
        position={"name": "learned", "max_length": 9},
    )
    model = Transformer(settings, 31, 7)
    found = roles(model)
    assert sorted(name for names, _ in found.values() for name in names) == sorted(
        dict(named_weights(model))
    )
    assert (
        all(name.startswith("position.") for name in found["positions"][0])
        and found["positions"][1] == 0
    )
    assert found["embeddings"] == (["embed.weight"], 0.0)
    assert ("head.weight" in found["matrices"][0]) is not tie_embeddings
    assert len(found["matrices"][0]) == 2 * 7 + (not tie_embeddings)
    assert (
        all("norm" in name for name in found["vectors"][0])
        and len(found["vectors"][0]) == 2 * 4 + 1
    )


def test_parameter_names_without_wrappers():
    assert (
        clean_name("module._orig_mod.layers.0._orig_mod.mlp.up.weight") == "layers.0.mlp.up.weight"
    )
    assert clean_name("layers.0.module.weight") == "layers.0.module.weight"
    net = Net()
    assert list(dict(named_weights(torch.compile(net)))) == list(dict(named_weights(net)))


def test_lr_and_weight_decay_per_role():
    """One update with gradients of 3: Adam's first step is lr · sign(g), after the decay lr ·
    decay."""
    groups = {"embeddings": {"lr": 0.2}, "vectors": {"weight_decay": 0.4}, "head": {"lr": 0.05}}
    settings = AdamWSettings(weight_decay=0.5, positions_lr=0.3, groups=groups)
    assert settings.rates == {
        "lr": 2e-3,
        "head_lr": 0.05,
        "embeddings_lr": 0.2,
        "positions_lr": 0.3,
    }
    net = Net(tie_embeddings=False)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    optimizer = make_optimizer(net, settings)
    assert [group["name"] for group in optimizer.param_groups] == list(ROLES)
    set_learning_rates(optimizer, settings.rates | {"lr": 0.1})
    for weight in net.parameters():
        weight.grad = torch.full_like(weight, 3.0)
    optimizer.step()
    expected = {  # rate, decay
        "embed.weight": (0.2, 0),
        "position.weight": (0.3, 0),
        "mix.weight": (0.1, 0.5),
        "mix.bias": (0.1, 0.4),
        "norm.weight": (0.1, 0.4),
        "head.weight": (0.05, 0.5),
    }
    for name, weight in net.named_parameters():
        rate, decay = expected[name]
        torch.testing.assert_close(weight.detach(), before[name] * (1 - rate * decay) - rate)


def test_invalid_group_settings():
    for asked, message in (
        (
            {"positions_lr": 1, "groups": {"positions": {"lr": 1}}},
            "positions_lr and groups.positions.lr",
        ),
        ({"groups": {"norms": {"lr": 1}}}, "Extra inputs"),
        ({"groups": {"head": {"lr": 0}}}, "greater than 0"),
    ):
        with pytest.raises(ValidationError, match=message):
            AdamWSettings(**asked)
    assert (
        AdamWSettings(groups={"positions": {"lr": 0.3}}).rates
        == AdamWSettings(positions_lr=0.3).rates
    )


def test_first_update_matches_manual_computation():
    """With bias correction the first step is lr · g / (|g| + eps), whatever the betas."""
    net = Net()
    optimizer = make_optimizer(net, AdamWSettings(lr=1.0, eps=0.5, weight_decay=0.0))
    set_learning_rates(optimizer, {"lr": 0.25})
    before = net.mix.bias.detach().clone()
    net.mix.bias.grad = torch.tensor([2.0, -2.0, 0.5, 0.0, 1.5, -0.5])
    optimizer.step()
    step = torch.tensor([0.8, -0.8, 0.5, 0.0, 0.75, -0.5])
    torch.testing.assert_close(net.mix.bias.detach(), before - 0.25 * step)


def test_fused_equals_plain():
    nets = [Net(), Net()]
    seeds = torch.Generator().manual_seed(3)
    nets[1].load_state_dict(nets[0].state_dict())
    fused = make_optimizer(nets[0], AdamWSettings())
    assert fused.param_groups[0]["fused"]
    groups = [
        {k: v for k, v in group.items() if k != "fused"}
        for group in make_optimizer(nets[1], AdamWSettings()).param_groups
    ]
    plain = torch.optim.AdamW(groups, fused=False, foreach=False)
    for _ in range(5):
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=seeds)
            b.grad = a.grad.clone()
        fused.step()
        plain.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_excluded():
    net = Net()
    net.mix.weight.requires_grad_(False)
    assert "matrices" not in roles(net)
    net.requires_grad_(False)
    with pytest.raises(TrainingError, match="frozen"):
        make_optimizer(net, AdamWSettings())


class NeverWaits(TorchDispatchMode):
    """Fails where the host would wait for the device to tell it a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        ), func
        return func(*args, **(kwargs or {}))


def bare_matrices():
    generator = torch.Generator().manual_seed(5)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 7), (6, 3))
    ]


OPTIMIZERS = {
    "fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "plain": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=False),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "muon": lambda weights: torch.optim.Muon(weights, lr=0.1),
    "together": lambda weights: CombinedOptimizer(
        [OPTIMIZERS["muon"](weights[:1]), OPTIMIZERS["fused"](weights[1:])]
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_skipped_steps_change_no_state_without_host_sync(make):
    """A run with broken steps, the first among them, is to the bit the run without them."""
    generator = torch.Generator().manual_seed(6)
    grads = [[torch.randn(w.shape, generator=generator) for w in bare_matrices()] for _ in range(3)]
    bad = [torch.full_like(grad, float("nan")) for grad in grads[0]]

    def run(plan):
        weights = bare_matrices()
        optimizer = make(weights)
        for step in plan:
            for weight, grad in zip(weights, bad if step is None else grads[step], strict=True):
                weight.grad = grad.clone()
            if step is None and optimizer.state:  # broken by the loss alone: gradients look well
                weights[0].grad = grads[0][0].clone()
            flag = torch.tensor(step is None)
            # torch's plain AdamW counts its steps on the host.
            with nullcontext() if make is OPTIMIZERS["plain"] else NeverWaits():
                guarded_step(optimizer, flag)
        return weights, [x for w in weights for x in optimizer.state[w].values()]

    with_bad = run([None, 0, None, None, 1, 2, None])
    without = run([0, 1, 2])
    assert all(a.equal(b) for a, b in zip(with_bad[0], without[0], strict=True))
    assert all(a.equal(b) for a, b in zip(with_bad[1], without[1], strict=True))
    assert not any(a.equal(b) for a, b in zip(without[0], bare_matrices(), strict=True))
