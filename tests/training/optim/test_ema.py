"""EMA of the weights: its closed form, skipped steps, and which weights a checkpoint gives."""

import pytest
import torch
from safetensors.torch import load_file

from errors import TrainingError
from run_directory.checkpoints import find_checkpoint
from run_directory.optimizer_settings import AdamWSettings, EmaSettings
from run_directory.weights import load_average
from tests.training.net import Net
from tests.training.states import restore, save_checkpoint
from training.optim.ema import EMA
from training.optim.optimizer import guarded_step, make_optimizer, set_learning_rates

HELD = torch.tensor(True)
FREE = torch.tensor(False)


def trained(plan, average_of, seed=0):
    """A net after one random update for each flag of `plan`, with its mean, and the weights after
    each."""
    torch.manual_seed(seed)
    net = Net().double()
    optimizer = make_optimizer(net, AdamWSettings())
    average = average_of(net)
    set_learning_rates(optimizer, {"lr": 0.1})
    seen = [net.mix.weight.detach().clone()]
    go_on(net, optimizer, average, plan, seen)
    return net, optimizer, average, torch.stack(seen)


def go_on(net, optimizer, average, plan, seen):
    for held in plan:
        for weight in net.parameters():
            weight.grad = torch.randn_like(weight)
        guarded_step(optimizer, held)
        average.update(held)
        if not held:
            seen.append(net.mix.weight.detach().clone())


def test_ema_equals_closed_form_with_skipped_steps():
    """d^n w_0 + (1 − d) Σ d^(n−i) w_i over the n steps that were applied."""
    plan = [FREE, HELD, FREE, FREE, HELD, HELD, FREE]
    net, _, average, seen = trained(plan, lambda net: EMA(net, EmaSettings(decay=0.7), 7))
    shares = torch.tensor(
        [0.7**4, *(0.3 * 0.7 ** (4 - i) for i in range(1, 5))], dtype=torch.float64
    )
    expected = (shares[:, None, None] * seen).sum(0)
    found = average.tensors()
    torch.testing.assert_close(found["mix.weight"], expected, rtol=1e-12, atol=1e-14)
    assert list(found) == [
        "embed.weight",
        "position.weight",
        "mix.weight",
        "mix.bias",
        "norm.weight",
    ]
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    with average.applied():
        assert net.mix.weight.equal(found["mix.weight"]) and not net.mix.weight.equal(
            before["mix.weight"]
        )
    assert all(weight.equal(before[name]) for name, weight in net.named_parameters())


def test_ema_of_half_precision_weights_is_float32():
    net = Net().bfloat16()
    average = EMA(net, EmaSettings(decay=0.999), 10)
    with torch.no_grad():
        net.mix.bias.fill_(1.0)
        average.load(None, 0)
        net.mix.bias.fill_(2.0)
    average.update(FREE)
    found = average.tensors()["mix.bias"]
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx([1.001] * 6, rel=1e-6)


def test_ema_resume_is_bit_exact_and_starts_if_missing(tmp_path):
    settings = EmaSettings(decay=0.7, start=4)
    plan = [FREE, FREE, HELD, FREE, FREE]

    def average_of(net):
        return EMA(net, settings, 10)

    net, optimizer, average, _ = trained(plan[:3], average_of)
    saved = save_checkpoint(tmp_path, 3, net, optimizer, average=average)
    assert load_file(saved.folder / "average.safetensors")["mix.weight"].equal(net.mix.weight)
    go_on(net, optimizer, average, plan, [])
    again, its_optimizer, its_average, _ = trained([FREE], average_of, seed=3)
    restore(again, its_optimizer, find_checkpoint(tmp_path), its_average)
    go_on(again, its_optimizer, its_average, plan, [])
    ours = average.tensors()
    theirs = its_average.tensors()
    assert all(theirs[name].equal(mean) for name, mean in ours.items())
    assert not ours["mix.weight"].equal(net.mix.weight)

    last = save_checkpoint(tmp_path, 8, net, optimizer, average=average)
    load_average(again, last)
    assert again.mix.weight.equal(ours["mix.weight"])
    bare = save_checkpoint(tmp_path, 9, net, optimizer)
    assert not bare.has_average and last.has_average
    restore(again, its_optimizer, bare, its_average)
    assert its_average.tensors()["mix.weight"].equal(net.mix.weight)
    (last.folder / "average.safetensors").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"average.safetensors has 0 bytes"):
        find_checkpoint(tmp_path, step=8)
