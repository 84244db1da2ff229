"""When a run validates, and what it logs."""

from types import SimpleNamespace

import numpy as np
import pytest

from data import ByteTokenizer
from data.preparation.prepared import OPENING, opening
from errors import TrainingError
from run_directory.training_settings import ValidationSettings
from training.checks import validation_steps


def due(steps, **settings):
    return sorted(validation_steps(ValidationSettings(**settings), steps))


def test_validation_steps_are_regular_and_include_the_last():
    assert due(10, interval=4) == [4, 8, 10]
    assert due(10, interval=None) == [10]
    assert due(100, interval=50, at=[0.25, 0.001, 3, 50]) == [1, 3, 25, 50, 100]
    with pytest.raises(TrainingError, match=r"validation\.at has 101, and the run 100 steps"):
        due(100, at=[101])
    with pytest.raises(ValueError, match="must be above 0"):
        ValidationSettings(at=[0])
    with pytest.raises(ValueError, match="neither a share"):
        ValidationSettings(at=[2.5])


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  \n\tCall me Ishmael.", "Call me"),
        ("Chapter one\nIt was", "Chapter"),
        ("Loomings", "Loomings"),
        ("", ""),
    ],
)
def test_sample_continues_validation_document(bos, text, expected):
    tokenizer = ByteTokenizer()
    document = np.array([tokenizer.bos_id] * bos + tokenizer.encode(text))
    assert len(text) < OPENING or len(expected) < OPENING
    assert opening(SimpleNamespace(has_bos=bos, document=lambda i: document), tokenizer) == expected
