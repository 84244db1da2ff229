"""The updates the step guard applies: hand-computed, on the host, and after a resume."""

import json
import math
from pathlib import Path

import pytest
import torch

from errors import TrainingError
from run_directory.training_settings import SkipNonFinite, SpikeSettings, StopOnNonFinite
from run_directory.weights import save_weights
from tests.training.net import Net
from training.optim.step_guard import NOT_FINITE, SPIKE, StepGuard
from training.retention import DIVERGED, raise_stopped
from training.step_result import StepMetrics

NAN = math.nan


def judged(guard, losses, norms=None):
    """(reason, count, stopped) of each step."""
    found = []
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        verdict = guard(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm))
        found.append((int(verdict.reason), int(verdict.count), bool(verdict.stopped)))
    return found


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
def test_stop_skips_all_updates_after_first_non_finite_step(broken):
    guard = StepGuard(StopOnNonFinite(), None, "cpu")
    assert judged(guard, [2.0, broken, 2.0]) == [(0, 0, False), (NOT_FINITE, 1, True), (0, 0, True)]
    guard = StepGuard(StopOnNonFinite(), None, "cpu")
    assert judged(guard, [2.0, 2.0], [1.0, broken])[1] == (NOT_FINITE, 1, True)


def test_skip_limit_counts_across_resume():
    guard = StepGuard(SkipNonFinite(limit=2), None, "cpu")
    assert judged(guard, [NAN, 2.0, NAN, 2.0]) == [
        (NOT_FINITE, 1, False), (0, 0, False), (NOT_FINITE, 2, False), (0, 0, False),
    ]  # fmt: skip
    resumed = StepGuard(SkipNonFinite(limit=2), None, "cpu")
    resumed.load(json.loads(json.dumps(guard.state())))
    for one in (guard, resumed):
        assert judged(one, [2.0, NAN, 1.0]) == [(0, 0, False), (NOT_FINITE, 3, True), (0, 0, True)]
    raised = StepGuard(SkipNonFinite(limit=3), None, "cpu")
    raised.load({"skipped": {"not finite": 2, "spike": 0}})
    assert judged(raised, [NAN]) == [(NOT_FINITE, 3, False)]


def test_spike_threshold_matches_manual_computation():
    """Of 1, 3, 1, 3 the mean is 2 and the deviation 1: with 2 sigmas, 4.01 is a spike and 3.99
    none."""
    settings = SpikeSettings(sigmas=2, window=4, limit=5)
    for loss, reason in ((4.01, SPIKE), (3.99, 0), (-50.0, 0)):
        guard = StepGuard(StopOnNonFinite(), settings, "cpu")
        assert judged(guard, [1.0, 3.0, 1.0, 3.0, loss])[-1][0] == reason
    # A spike is not remembered, an applied step takes the place of the oldest.
    guard = StepGuard(StopOnNonFinite(), settings, "cpu")
    judged(guard, [1.0, 3.0, 1.0, 3.0, 99.0])
    assert sorted(guard.state()["losses"]) == [1.0, 1.0, 3.0, 3.0]
    judged(guard, [2.0])
    assert guard.state()["losses"] == [2.0, 3.0, 1.0, 3.0] and guard.state()["applied"] == 5
    assert guard.state()["skipped"] == {"not finite": 0, "spike": 1}


def test_no_spikes_before_window_is_full_or_after_new_stage():
    guard = StepGuard(StopOnNonFinite(), SpikeSettings(sigmas=1, window=3), "cpu")
    assert [reason for reason, *_ in judged(guard, [1.0, 9.0, 99.0, 9.0])] == [0, 0, 0, 0]
    assert judged(guard, [1e4])[0][0] == SPIKE
    guard.begin_stage()
    assert [reason for reason, *_ in judged(guard, [1e4, 1e5, 1e6])] == [0, 0, 0]


def test_spike_limit_stops_the_run():
    guard = StepGuard(SkipNonFinite(), SpikeSettings(sigmas=1, window=2, limit=1), "cpu")
    assert judged(guard, [1.0, 2.0, 50.0, NAN, 60.0])[2:] == [
        (SPIKE, 1, False), (NOT_FINITE, 1, False), (SPIKE, 2, True),
    ]  # fmt: skip


def test_resume_is_bit_exact():
    generator = torch.Generator().manual_seed(0)
    losses = (torch.randn(400, generator=generator, dtype=torch.float64).exp() / 3).tolist()
    settings = SpikeSettings(sigmas=3, window=20, limit=400)
    whole = StepGuard(StopOnNonFinite(), settings, "cpu")
    expected = judged(whole, losses)
    assert 5 < sum(reason == SPIKE for reason, *_ in expected) < 100
    guard = StepGuard(StopOnNonFinite(), settings, "cpu")
    found = []
    for start in range(0, 400, 7):
        saved = json.dumps(guard.state())
        guard = StepGuard(StopOnNonFinite(), settings, "cpu")
        guard.load(json.loads(saved))
        found += judged(guard, losses[start : start + 7])
    assert found == expected and guard.state() == whole.state()


def test_error_suggests_how_to_resume():
    for reason, count, message in (
        (NOT_FINITE, 1, r"training.on_nonfinite.name=skip"),
        (NOT_FINITE, 4, r"number 4 of the run.*raise training.on_nonfinite.limit"),
        (SPIKE, 3, r"spike number 3 of the run.*raise training.on_spike.limit"),
    ):
        with pytest.raises(TrainingError, match=f"step 7: the loss is nan.*{message}"):
            raise_stopped(7, StepMetrics(NAN, 2.0, 0, reason, count, True), Path("runs/x"), 6)


@pytest.mark.parametrize(
    ("saved", "applied", "good", "skip"),
    [
        ([(2, {}), (5, {})], 6, "that of step 5:", True),
        ([(2, {}), (5, {})], 5, "that of step 2:", False),
        ([(2, {}), (5, {DIVERGED: True})], 6, "that of step 2:", True),
        ([(5, {})], 5, "no good checkpoint", False),
        ([], 0, "no good checkpoint", True),
    ],
)
def test_good_checkpoint_precedes_the_failure(tmp_path, saved, applied, good, skip):
    for step, state in saved:
        save_weights(tmp_path, step, Net(), state=state)
    with pytest.raises(TrainingError) as error:
        raise_stopped(7, StepMetrics(NAN, 2.0, 0, NOT_FINITE, 1, True), tmp_path, applied)
    assert good in str(error.value) and ("name=skip" in str(error.value)) == skip
