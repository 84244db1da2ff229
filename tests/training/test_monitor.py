"""When a run looks at its held-out loss, and what it says of it."""

import pytest

from training.errors import TrainingError
from training.monitor import due_looks
from training.record import looks_in_words
from training.telling_settings import ValidationSettings


def due(steps, **settings):
    return sorted(due_looks(ValidationSettings(**settings), steps))


def test_looks_are_regular_as_told_and_at_the_end():
    assert due(10, every=4) == [4, 8, 10]
    assert due(10, every=None) == [10]
    assert due(100, every=50, at=[0.25, 0.001, 3, 50]) == [1, 3, 25, 50, 100]
    with pytest.raises(TrainingError, match=r"validation\.at has 101, and the run 100 steps"):
        due(100, at=[101])
    with pytest.raises(ValueError, match="must be above 0"):
        ValidationSettings(at=[0])
    with pytest.raises(ValueError, match="neither a share"):
        ValidationSettings(at=[2.5])


def test_a_look_is_said_with_its_change():
    assert looks_in_words({16: 2.0, 32: 3.25}, {}) == ["16: 2.0000", "32: 3.2500"]
    assert looks_in_words({16: 1.5, 32: 3.5, 64: 1.0}, {16: 2.0, 32: 3.25}) == [
        "16: 1.5000 (-0.5000)", "32: 3.5000 (+0.2500)", "64: 1.0000",
    ]  # fmt: skip
