"""Learning rates against hand-computed values."""

import math

import pytest

from errors import TrainingError
from run_directory.optimizer_settings import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    WsdSchedule,
)
from training.schedule import learning_rate, steps_of


def rates(schedule, steps, peak=8.0):
    return [learning_rate(schedule, peak, step, steps) for step in range(steps)]


def test_warmup_in_steps_and_as_fraction():
    assert [steps_of(ConstantSchedule(warmup=w).warmup, 50) for w in (0, 0.02, 0.5, 1, 7)] == [
        0,
        1,
        25,
        1,
        7,
    ]
    assert rates(ConstantSchedule(warmup=4), 6) == [2, 4, 6, 8, 8, 8]
    assert rates(ConstantSchedule(warmup=0.5), 6)[:4] == pytest.approx([8 / 3, 16 / 3, 8, 8])
    assert rates(ConstantSchedule(warmup=0), 3) == [8, 8, 8]


@pytest.mark.parametrize(
    ("share", "steps", "expected"), [(0.03, 2929, 88), (0.29, 100, 29), (0.57, 100, 57)]
)
def test_shares_are_rounded_to_the_nearest_step(share, steps, expected):
    """0.29 · 100 is 28.999999999999996 in floating point, and 0.03 · 2929 is 87.87."""
    assert steps_of(share, steps) == expected
    assert rates(ConstantSchedule(warmup=share), steps).index(8.0) == expected - 1
    wsd = WsdSchedule(warmup=0, decay=share, min_lr_ratio=0)
    assert sum(rate < 8.0 for rate in rates(wsd, steps)) == expected - 1


def test_linear():
    assert rates(LinearSchedule(warmup=2), 6) == [4, 8, 8, 6, 4, 2]
    assert rates(LinearSchedule(warmup=2, min_lr_ratio=0.5), 6) == [4, 8, 8, 7, 6, 5]


def test_cosine():
    got = rates(CosineSchedule(warmup=1, min_lr_ratio=0.25), 5)
    half = math.sqrt(0.5)  # cos 45°
    shares = [1, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert got == pytest.approx([8] + [2 + 6 * share for share in shares], rel=1e-15)


def test_wsd():
    assert rates(WsdSchedule(warmup=2, decay=0.4, min_lr_ratio=0), 10) == [
        4,
        8,
        8,
        8,
        8,
        8,
        8,
        6,
        4,
        2,
    ]
    assert rates(WsdSchedule(warmup=0, decay=0.01, min_lr_ratio=0), 3) == [8, 8, 8]
    assert rates(WsdSchedule(warmup=0, decay=1, min_lr_ratio=0.5), 4) == [8, 7, 6, 5]


def test_lr_outside_the_run():
    for step in (-1, 5):
        with pytest.raises(TrainingError, match=f"step {step} is outside the run's 5 steps"):
            learning_rate(ConstantSchedule(), 1.0, step, 5)
