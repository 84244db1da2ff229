"""The benchmark's checks and tables. Nothing is timed."""

import numpy as np
import pandas as pd
import pytest
import torch

from scripts.benchmark import agreement, growth_shape, parameters
from scripts.benchmarks.benchmark_figures import exponent
from scripts.benchmarks.benchmark_report import GrowthRow, SpeedRow, StartupRow, add
from scripts.benchmarks.workloads import Measured, check_greedy


def test_rows_replace_rows_of_the_same_kind(tmp_path):
    date = "2026-01-01"
    speed = {"threads": 1, "fastest": 2.0, "slowest": 1.0, "ratio_of_fastest": 1.0, "samples": 3}
    speed |= {"disturbed": 0, "peak_mib": 9.0, "equal": "", "date": date, "tokens_per_second": 2.0}
    for ratio in (1.5, 1.7):
        add([SpeedRow("A", "train", "ours", "transformers", ratio=ratio, **speed)], tmp_path)
    growth = [GrowthRow("growth-train", "length", n, "ours", n * 2.0, 1.0, date) for n in (2, 4)]
    add(growth, tmp_path)
    add([StartupRow("x --help", 0.5, 0.6, date)], tmp_path)
    assert list(pd.read_csv(tmp_path / "cpu.csv")["ratio"]) == [1.7]
    assert "| 1.70 |" in (tmp_path / "cpu.md").read_text()
    assert (tmp_path / "cpu.png").stat().st_size and (tmp_path / "growth.png").stat().st_size
    sizes = np.array([1, 2, 4, 8, 16, 32])
    assert exponent(sizes, np.where(sizes < 8, 5.0, sizes**1.5)) == pytest.approx(1.5)


def test_different_results_are_refused():
    table = torch.tensor([[0.0, 2.0, 1.9995], [3.0, 0.0, 1.0], [0.0, 1.0, 5.0]])
    prompts = torch.tensor([[0]])
    for tokens in ([1, 0, 1], [2, 2]):
        check_greedy(lambda row: table[row], prompts, torch.tensor([tokens]))
    with pytest.raises(ValueError):
        check_greedy(lambda row: table[row], prompts, torch.tensor([[1, 2]]))
    ours, theirs = (Measured([], 1, [value], 0) for value in (1.0, 1.01))
    assert agreement("train", ours, ours) == "difference 0.0e+00"
    with pytest.raises(Exception, match="differ"):
        agreement("train", ours, theirs)


def test_parameters_of_a_shape():
    shape = growth_shape("growth-train", "dim", 512)
    # embedding and head, norms; q and o, k and v, feed-forward
    layer = 2 * 512**2 + 2 * 512 * 256 + 3 * 512 * 1360 + 2 * 512
    assert parameters(shape) == 2 * 4096 * 512 + 512 + 4 * layer
