"""Numbers of a step: the guard that skips updates, learning rates, the EMA of the weights."""

import json
import math

import pytest
import torch

from run_directory.training_settings import (
    AdamWSettings,
    ConstantSchedule,
    CosineSchedule,
    EmaSettings,
    LinearSchedule,
    SkipNonFinite,
    SpikeSettings,
    StopOnNonFinite,
    ValidationSettings,
    WsdSchedule,
    as_steps,
)
from tests.training.net import APPLY, SKIP, Net, save, state_of
from training.optimizer import Optimizer
from training.step_guard import NOT_FINITE, SPIKE, StepGuard
from training.train_state import EMA

NAN = math.nan


def judged(guard, losses, norm=1.0):
    """(reason, count, stopped) of each step."""
    verdicts = []
    for loss in losses:
        decision = guard(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm))
        assert bool(decision.skip) == (int(decision.reason) > 0 or bool(decision.stopped))
        reason = int(decision.reason)
        verdicts.append((reason, int(decision.count), bool(decision.stopped)))
    return verdicts


def reasons(guard, losses):
    return [reason for reason, *_ in judged(guard, losses)]


def resumed(guard, on_nonfinite, on_spike=None):
    again = StepGuard(on_nonfinite, on_spike, "cpu")
    again.load(json.loads(json.dumps(guard.state())))
    return again


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
def test_stop_skips_all_updates_after_first_non_finite_step(broken):
    guard = StepGuard(StopOnNonFinite(), None, "cpu")
    found = judged(guard, [2.0, broken, 2.0])
    assert found == [(0, 0, False), (NOT_FINITE, 1, True), (0, 0, True)]
    guard = StepGuard(StopOnNonFinite(), None, "cpu")
    assert judged(guard, [2.0], norm=broken) == [(NOT_FINITE, 1, True)]


def test_skip_limit_counts_across_resume():
    settings = SkipNonFinite(limit=2)
    guard = StepGuard(settings, None, "cpu")
    assert guard.state() == {}
    first = (NOT_FINITE, 1, False)
    second = (NOT_FINITE, 2, False)
    third = (NOT_FINITE, 3, True)
    assert judged(guard, [NAN, 2.0, NAN]) == [first, (0, 0, False), second]
    for again in (resumed(guard, settings), guard):
        assert judged(again, [2.0, NAN, 1.0]) == [(0, 0, False), third, (0, 0, True)]
    raised = StepGuard(SkipNonFinite(limit=3), None, "cpu")
    raised.load({"skipped": {"not finite": 2, "spike": 0}})
    assert judged(raised, [NAN]) == [(NOT_FINITE, 3, False)]


def test_spike_threshold_matches_manual_computation():
    """Of 1, 3, 1, 3 the mean is 2 and the deviation 1: with 2 sigmas, 4.01 is a spike and 3.99
    none."""
    settings = SpikeSettings(sigmas=2, window=4, limit=5)
    for loss, reason in (
        (4.01, SPIKE),
        (3.99, 0),
        (-50.0, 0),
    ):
        guard = StepGuard(StopOnNonFinite(), settings, "cpu")
        assert reasons(guard, [1.0, 3.0, 1.0, 3.0, loss])[-1] == reason
    # A spike is not remembered, an applied step takes the place of the oldest.
    guard = StepGuard(StopOnNonFinite(), settings, "cpu")
    judged(guard, [1.0, 3.0, 1.0, 3.0, 99.0])
    assert sorted(guard.state()["losses"]) == [1.0, 1.0, 3.0, 3.0]
    judged(guard, [2.0])
    assert guard.state() == {
        "skipped": {"not finite": 0, "spike": 1},
        "losses": [2.0, 3.0, 1.0, 3.0],
        "applied": 5,
    }


def test_no_spikes_before_window_is_full_or_after_new_stage():
    guard = StepGuard(SkipNonFinite(), SpikeSettings(sigmas=1, window=3, limit=1), "cpu")
    assert reasons(guard, [1.0, 9.0, 99.0, 9.0, 1e4]) == [0, 0, 0, 0, SPIKE]
    guard.begin_stage()
    assert reasons(guard, [1e4, 1e5, 1e6]) == [0, 0, 0]
    # the limit counts spikes only
    assert judged(guard, [NAN, 1e9]) == [(NOT_FINITE, 1, False), (SPIKE, 2, True)]


def test_decisions_do_not_depend_on_resumes():
    generator = torch.Generator().manual_seed(0)
    losses = (torch.randn(400, generator=generator, dtype=torch.float64).exp() / 3).tolist()
    settings = SpikeSettings(sigmas=3, window=20, limit=400)
    uninterrupted = StepGuard(StopOnNonFinite(), settings, "cpu")
    expected = judged(uninterrupted, losses)
    assert 5 < sum(reason == SPIKE for reason, *_ in expected) < 100
    guard = StepGuard(StopOnNonFinite(), settings, "cpu")
    verdicts = []
    for start in range(0, 400, 7):
        guard = resumed(guard, StopOnNonFinite(), settings)
        verdicts += judged(guard, losses[start : start + 7])
    assert verdicts == expected
    assert guard.state() == uninterrupted.state()


# Learning rates


def rates(schedule, steps):
    return [schedule.rate_at(8.0, step, steps) for step in range(steps)]


HALF = math.sqrt(0.5)  # cos 45°


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ConstantSchedule(warmup=4), [2, 4, 6, 8, 8, 8]),
        (ConstantSchedule(warmup=0.5), [8 / 3, 16 / 3, 8, 8, 8, 8]),
        (ConstantSchedule(warmup=0), [8, 8, 8]),
        (LinearSchedule(warmup=2, min_lr_ratio=0.5), [4, 8, 8, 7, 6, 5]),
        (
            CosineSchedule(warmup=1, min_lr_ratio=0.25),
            [8, *(2 + 6 * share for share in (1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2))],
        ),
        (WsdSchedule(warmup=2, decay=0.4, min_lr_ratio=0), [4, 8, 8, 8, 8, 8, 8, 6, 4, 2]),
        (WsdSchedule(warmup=0, decay=1, min_lr_ratio=0.5), [8, 7, 6, 5]),
    ],
)
def test_learning_rates(schedule, expected):
    assert rates(schedule, len(expected)) == pytest.approx(expected, rel=1e-15)


def test_shares_are_rounded_to_the_nearest_step():
    """0.29 · 100 is 28.999999999999996 in floating point, and 0.03 · 2929 is 87.87."""
    assert [as_steps(share, 50) for share in (0, 0.02, 0.5, 1, 7)] == [0, 1, 25, 1, 7]
    for share, steps, expected in ((0.03, 2929, 88), (0.29, 100, 29)):
        assert as_steps(share, steps) == expected
        assert rates(ConstantSchedule(warmup=share), steps).index(8.0) == expected - 1
        wsd = WsdSchedule(warmup=0, decay=share, min_lr_ratio=0)
        assert sum(rate < 8.0 for rate in rates(wsd, steps)) == expected - 1


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({"interval": 4}, 12, [4, 8, 12]),
        ({"interval": 5}, 12, [5, 10, 12]),
        ({"interval": None, "at": [0.01, 0.5, 7]}, 12, [1, 6, 7, 12]),
        ({}, 9, [1, 3, 5, 7, 9]),  # fifths, rounded down
        ({}, 1249, [249, 250, 499, 500, 749, 750, 999, 1000, 1249]),
        ({}, 1250, [250, 500, 750, 1000, 1250]),
        ({}, 1300, [250, 500, 750, 1000, 1250, 1300]),
    ],
)
def test_validation_steps(settings, steps, expected):
    assert sorted(ValidationSettings(**settings).steps(steps)) == expected
    with pytest.raises(
        ValueError, match=rf"validation.at has {steps + 1}, but the run has {steps}"
    ):
        ValidationSettings(at=[steps + 1]).steps(steps)


# EMA


def averaged(flags, settings, seed=0):
    """A state after one random update for each flag, and the weights of `mix` after each that was
    applied."""
    torch.manual_seed(seed)
    net = Net().double()
    state = state_of(net, Optimizer(net, AdamWSettings()), ema=EMA(net, settings, 10))
    state.optimizer.set_learning_rates({"lr": 0.1})
    history = [net.mix.weight.detach().clone(), *go_on(state, flags)]
    return state, torch.stack(history)


def go_on(state, flags):
    history = []
    for flag in flags:
        for weight in state.model.parameters():
            weight.grad = torch.randn_like(weight)
        state.optimizer.step(flag)
        state.step += 1
        state.ema.update(state.step, flag)
        if not flag:
            history.append(state.model.mix.weight.detach().clone())
    return history


@pytest.mark.parametrize(
    ("start", "passed"),
    [
        (0, 0),
        (2, 1),  # applied updates of the first two
        (0.24, 1),  # of 10 steps
        (3, 2),
        (7, 4),
    ],
)
def test_ema_equals_closed_form_with_skipped_steps(start, passed):
    """d^n w_s + (1 − d) Σ d^(n−i) w_i over the n steps after `start` that were applied."""
    flags = [APPLY, SKIP, APPLY, APPLY, SKIP, SKIP, APPLY]
    state, history = averaged(flags, EmaSettings(decay=0.7, start=start))
    n = 4 - passed
    shares = [0.7**n, *(0.3 * 0.7 ** (n - i) for i in range(1, n + 1))]
    shares = torch.tensor(shares, dtype=torch.float64)
    expected = torch.einsum("n,nij->ij", shares, history[passed:])
    mean = state.ema.means["mix.weight"]
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-14)
    before = {name: weight.detach().clone() for name, weight in state.model.named_parameters()}
    assert state.ema.means.keys() == before.keys()
    with state.ema.applied():
        inside = state.model.mix.weight.detach().clone()
    assert inside.equal(mean)
    assert inside.equal(before["mix.weight"]) == (n == 0)
    assert all(weight.equal(before[name]) for name, weight in state.model.named_parameters())


def test_ema_starts_from_a_checkpoint_without_it(tmp_path):
    state, _ = averaged([APPLY, APPLY], EmaSettings(decay=0.7))
    assert not state.ema.means["mix.weight"].equal(state.model.mix.weight)
    state.restore(save(tmp_path, 9, state_of(state.model, state.optimizer)))
    assert state.ema.means["mix.weight"].equal(state.model.mix.weight)
