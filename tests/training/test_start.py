"""What is refused, and forecast, before anything is computed."""

import os

import pytest
import torch

from training.config import load_settings
from training.errors import TrainingError
from training.hardware import free_memory, peak_flops
from training.settings import RunSettings
from training.start import check_model

LEARNED = ["model.position.name=learned", "train_length=64"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.position.max_length=63"], "train_length 64 is longer than the 63 positions"),
        (["model.position.max_length=127", "training.validation.multiples=[4,2]"], "begins at 2 × 64 .* 127"),
    ],
)
def test_positions_that_end_too_early_are_refused_before_any_data(words, said):
    with pytest.raises(TrainingError, match=said):
        check_model(load_settings(RunSettings, LEARNED + words))


@pytest.mark.parametrize(
    "words", [[], ["model.position.max_length=128", "training.validation.multiples=[2]"]]
)
def test_positions_that_reach_are_not(words):
    check_model(load_settings(RunSettings, LEARNED + words))


def test_free_memory_lies_between_nothing_and_all_there_is():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory(torch.device("cpu")) <= total


def test_measuring_the_machine_leaves_the_random_generator_alone():
    before = torch.get_rng_state()
    assert peak_flops(torch.device("cpu")) > 1e6
    assert torch.get_rng_state().equal(before)
