"""Which weights decay, under which names, and one update by hand."""

import pytest
import torch

from model import ModelSettings, Transformer
from tests.training.toy import Net
from training.errors import TrainingError
from training.optimizer import clean_name, make_optimizer, named_weights, set_learning_rate
from training.settings import AdamWSettings


def roles(model):
    optimizer = make_optimizer(model, AdamWSettings(weight_decay=0.3))
    return {group["name"]: (group["names"], group["weight_decay"]) for group in optimizer.param_groups}


def test_groups_by_role():
    assert roles(Net(tied=True)) == {
        "matrices": (["mix.weight"], 0.3),
        "embeddings": (["embed.weight"], 0.0),
        "vectors": (["mix.bias", "norm.weight"], 0.0),
        "positions": (["position.weight"], 0.0),
    }
    assert roles(Net(tied=False))["matrices"] == (["mix.weight", "head.weight"], 0.3)


@pytest.mark.parametrize("tied", [True, False])
def test_roles_of_the_real_model(tied):
    settings = ModelSettings(
        dim=12, layers=2, heads=2, tied=tied, qk_norm=True, position={"name": "learned", "max_length": 9}
    )
    model = Transformer(settings, 31, 7)
    found = roles(model)
    assert sorted(name for names, _ in found.values() for name in names) == sorted(dict(named_weights(model)))
    assert all(name.startswith("position.") for name in found["positions"][0]) and found["positions"][1] == 0
    assert found["embeddings"] == (["embed.weight"], 0.0)
    assert ("head.weight" in found["matrices"][0]) is not tied
    assert len(found["matrices"][0]) == 2 * 7 + (not tied)
    assert all("norm" in name for name in found["vectors"][0]) and len(found["vectors"][0]) == 2 * 4 + 1


def test_names_without_wrappers():
    assert clean_name("module._orig_mod.layers.0._orig_mod.mlp.up.weight") == "layers.0.mlp.up.weight"
    assert clean_name("layers.0.module.weight") == "layers.0.module.weight"
    net = Net()
    assert list(dict(named_weights(torch.compile(net)))) == list(dict(named_weights(net)))


def test_decay_alone_shrinks_matrices_and_nothing_else():
    net = Net(tied=False)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    optimizer = make_optimizer(net, AdamWSettings(lr=0.5, weight_decay=0.2))
    for weight in net.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in net.named_parameters():
        factor = 0.9 if name in ("mix.weight", "head.weight") else 1.0  # 1 − lr · decay
        torch.testing.assert_close(weight.detach(), before[name] * factor)


def test_first_update_by_hand():
    """With bias correction the first step is lr · g / (|g| + eps), whatever the betas."""
    net = Net()
    optimizer = make_optimizer(net, AdamWSettings(lr=1.0, eps=0.5, weight_decay=0.0))
    set_learning_rate(optimizer, 0.25)
    before = net.mix.bias.detach().clone()
    net.mix.bias.grad = torch.tensor([2.0, -2.0, 0.5, 0.0, 1.5, -0.5])
    optimizer.step()
    step = torch.tensor([0.8, -0.8, 0.5, 0.0, 0.75, -0.5])
    torch.testing.assert_close(net.mix.bias.detach(), before - 0.25 * step)


def test_fused_equals_plain():
    nets, seeds = [Net(), Net()], torch.Generator().manual_seed(3)
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


def test_frozen_weights_are_left_out_and_all_frozen_is_an_error():
    net = Net()
    net.mix.weight.requires_grad_(False)
    assert "matrices" not in roles(net)
    net.requires_grad_(False)
    with pytest.raises(TrainingError, match="frozen"):
        make_optimizer(net, AdamWSettings())
