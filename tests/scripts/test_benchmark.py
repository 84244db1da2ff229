"""The benchmark's checks and table. Nothing is timed."""

from dataclasses import replace

import pytest
import torch

from errors import TrainingError
from scripts.benchmark import CASES, Workload, agreement, check_greedy, comparisons

WORK = Workload("train", "tiny", "ours", "cpu", threads=1, repeats=1)


def test_every_case_runs_and_ours_agrees_with_the_baseline():
    for case in ("train", "prefill", "decode-1", "fixed-targets", "scheme-train"):
        for baseline, variants in comparisons(case, "cpu", ["gated_deltanet"]):
            names = [name for name in (baseline, *variants) if "compiled" not in name]
            works = [replace(WORK, case=case, variant=name) for name in names]
            numbers = [CASES[case](work).call() for work in works]
            assert all(len(own) > 0 for own in numbers)
            for work, own in zip(works, numbers, strict=True):
                agreement(work, numbers[0], own)


def test_different_results_are_refused():
    table = torch.tensor([[0.0, 2.0, 1.9995], [3.0, 0.0, 1.0], [0.0, 1.0, 5.0]])
    prompts = torch.tensor([[0]])
    for tokens in ([1, 0, 1], [2, 2]):
        check_greedy(lambda row: table[row], prompts, torch.tensor([tokens]))
    with pytest.raises(ValueError):
        check_greedy(lambda row: table[row], prompts, torch.tensor([[1, 2]]))
    with pytest.raises(TrainingError, match="differ"):
        agreement(WORK, [1.0], [1.01])
