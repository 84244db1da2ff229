"""float16 with loss scaling: against torch.amp.GradScaler and float32, over resumes and processes."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from model.loss import OutputHead, summed_nll
from run_directory.checkpoints import find_checkpoint
from run_directory.training_settings import AdamWSettings, SkipNonFinite, SpikeSettings
from tests.training.curves import Training, shared
from tests.training.net import Net
from tests.training.test_processes import ONE_EACH, SHARDED, SMALL, farthest, prepared
from tests.training.tiny import cut, files_of, lines, trained
from training import loss_scale
from training.loss_scale import LossScale
from training.optimizer import Optimizer
from training.step_guard import NOT_FINITE, OVERFLOW, StepGuard

__all__ = ["prepared"]  # a fixture
FLOAT16 = [*SMALL, "training.precision=float16"]
FLOAT32 = [*SMALL, "training.precision=float32"]
OVERFLOWS = [False, True, True, False, False, False, False, True, False]


def test_scale_and_weights_match_grad_scaler(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    torch.manual_seed(0)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    optimizer = Optimizer(ours, AdamWSettings())
    (expected,) = Optimizer(theirs, AdamWSettings()).parts
    scale = LossScale("cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale.START, growth_interval=3)
    guard = StepGuard(SkipNonFinite(limit=1), SpikeSettings(sigmas=100, window=2), "cpu")
    for step, overflows in enumerate(OVERFLOWS):
        tokens = torch.randint(11, (3, 5))
        losses = [cross_entropy(net(tokens).mT, tokens.roll(1, 1)) for net in (ours, theirs)]
        (losses[0] * scale.scale).backward()
        scaler.scale(losses[1]).backward()
        if overflows:
            for net in (ours, theirs):
                net.mix.weight.grad[0, 0] = math.inf
        scale.unscale(optimizer.weights)
        found = scale.overflows(losses[0], optimizer.clip_grad_norm(None))
        far = losses[0] + 1e9 * overflows  # a spike, if it counted
        decision = guard(far, torch.tensor(math.inf if overflows else 1.0), found)
        optimizer.step(decision.skip)
        scale.update(found)
        scaler.step(expected)
        scaler.update()
        assert int(decision.reason) == (OVERFLOW if overflows else 0), step
        assert float(scale.scale) == scaler.get_scale(), step
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.equal(b), step
        for net in (ours, theirs):
            net.zero_grad()
    assert guard.state()["skipped"] == {"not finite": 0, "spike": 0, "overflow": 3}
    assert guard.state()["applied"] == 6


@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_what_scaling_does_not_cause_is_not_finite(loss):
    """A loss that is not finite, or gradients that are not at a scale of 1."""
    scale = LossScale("cpu")
    if math.isfinite(loss):
        scale.scale.fill_(1.0)
    guard = StepGuard(SkipNonFinite(limit=1), None, "cpu")
    loss, norm = torch.tensor(loss), torch.tensor(math.inf)
    decision = guard(loss, norm, scale.overflows(loss, norm))
    assert (int(decision.reason), int(decision.count)) == (NOT_FINITE, 1)


def test_head_gradient_of_many_equal_tokens_does_not_overflow():
    """Its sum over tokens exceeds 65,504, the largest number of float16."""
    x = torch.full((1, 20_000, 2), 5.0, requires_grad=True)
    weight = torch.zeros(3, 2, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        summed_nll(
            OutputHead(weight), x, torch.zeros(1, 20_000, dtype=torch.int64), None
        ).backward()
    expected = torch.tensor([[-2 / 3], [1 / 3], [1 / 3]]) * 100_000
    torch.testing.assert_close(weight.grad, expected.expand(3, 2), rtol=1e-3, atol=0)


def test_losses_follow_float32_and_an_overflow_is_skipped(prepared):
    exact = Training(FLOAT32, prepared).steps(0, 12)
    half = Training([*FLOAT16, "training.z_loss=1e-5"], prepared)
    assert farthest(half.steps(0, 12), exact) < 2e-2

    training = Training([*FLOAT16, "training.on_spike={sigmas: 100}"], prepared)
    training.steps(0, 3)
    state = training.state
    state.loss_scale.scale.fill_(2.0**40)
    before = [weight.detach().clone() for weight in state.model.parameters()]
    training.step(3)
    assert all(a.equal(b) for a, b in zip(before, state.model.parameters(), strict=True))
    assert float(state.loss_scale.scale) == 2.0**39
    assert state.guard.state()["skipped"] == {"not finite": 0, "spike": 0, "overflow": 1}
    assert state.guard.state()["applied"] == 3


def test_resume_is_exact(overrides, tmp_path, monkeypatch):
    """The run begins with overflows; the scale also grows."""
    monkeypatch.setattr(loss_scale, "START", 2.0**27)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    words = [*overrides, "training.precision=float16", "training.checkpoint={interval: 3, keep: 9}"]
    words += ["--run-dir", str(tmp_path)]
    assert trained(*words) == 0
    whole, files = lines(tmp_path), files_of(tmp_path, 12)
    train = [line for line in whole if line["kind"] == "train"]
    skipped = [line["skipped_steps"] for line in train if "skipped" in line]
    assert skipped == list(range(1, len(skipped) + 1)) != []
    scales = [line["loss_scale"] for line in train]
    assert scales[0] == 2.0**27
    assert any(a < b for a, b in pairwise(scales))
    stored = find_checkpoint(tmp_path, 3).state["loss_scale"]
    assert stored["scale"] == scales[3]
    cut(tmp_path, 3)
    assert trained(*words) == 0
    assert lines(tmp_path)[-9:] == whole[-9:]
    assert files_of(tmp_path, 12)[:3] == files[:3]


def curve(overrides, prepared, broken: bool) -> tuple[list, float, dict]:
    """Six updates, the second with one infinite gradient in the last process, if `broken`."""
    with pytest.MonkeyPatch.context() as patch:
        training = Training([*FLOAT16, *overrides], prepared)
        state = training.state
        unscale = LossScale.unscale

        def breaking(self, weights):
            if broken and state.step == 1 and training.parallel.rank == training.parallel.world - 1:
                grad = state.model.layers[0].mlp.up.weight.grad
                getattr(grad, "_local_tensor", grad)[0, 0] = math.inf
            unscale(self, weights)

        patch.setattr(LossScale, "unscale", breaking)
        losses = training.steps(0, 6)
        return losses, float(state.loss_scale.scale), state.guard.state()


def test_processes_agree_with_one(prepared):
    (one, *_), broken = (curve([], prepared, broken) for broken in (False, True))

    def work():
        ddp = curve([ONE_EACH], prepared, False)
        return ddp, curve([SHARDED, ONE_EACH], prepared, True)

    for (ddp, scale, _), sharded in shared(2, work):
        assert farthest(ddp, one) < 1e-2
        assert scale == loss_scale.START
        assert (
            sharded[1:]
            == broken[1:]
            == (loss_scale.START / 2, {"skipped": {"not finite": 0, "spike": 0, "overflow": 1}})
        )
        assert sharded[0][1][1] == broken[0][1][1] == math.inf
        without = [[pair for n, pair in enumerate(each[0]) if n != 1] for each in (sharded, broken)]
        assert farthest(*without) < 1e-2
