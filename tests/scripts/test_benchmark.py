"""The benchmark's checks and tables. Nothing is timed."""

import numpy as np
import pandas as pd
import pytest
import torch

from scripts.benchmark import agreement, growth_shape, parameters
from scripts.benchmarks.figures import exponent
from scripts.benchmarks.report import GrowthRow, SpeedRow, StartupRow, add
from scripts.benchmarks.workloads import Measured, check_greedy, shape_of


def test_exponent_is_fitted_to_the_larger_half():
    sizes = np.array([1, 2, 4, 8, 16, 32])
    seconds = np.where(sizes < 8, 5.0, sizes**1.5)
    assert exponent(sizes, seconds) == pytest.approx(1.5)
    assert np.isnan(exponent(sizes[:1], seconds[:1]))


def test_rows_replace_rows_of_the_same_kind(tmp_path):
    speed = {"threads": 1, "fastest": 2.0, "slowest": 1.0, "ratio_of_fastest": 1.0, "samples": 3}
    speed |= {
        "disturbed": 0,
        "peak_mib": 9.0,
        "equal": "",
        "date": "2026-01-01",
        "tokens_per_second": 2.0,
    }
    for ratio in (1.5, 1.7):
        add([SpeedRow("A", "train", "ours", "transformers", ratio=ratio, **speed)], tmp_path)
    add([SpeedRow("A", "scheme-train", "t5", "rope", ratio=0.5, **speed)], tmp_path)
    add(
        [
            GrowthRow("growth-train", "length", n, "ours", n * 2.0, 1.0, "2026-01-01")
            for n in (2, 4)
        ],
        tmp_path,
    )
    add([StartupRow("x --help", 0.5, 0.6, "2026-01-01")], tmp_path)
    assert list(pd.read_csv(tmp_path / "cpu.csv")["ratio"]) == [1.7]
    page = (tmp_path / "cpu.md").read_text()
    assert "| t5 | A | 2.00 | 1.35 |" in page and "| 1.70 |" in page and "| 1.00 | 1 |" in page
    assert (tmp_path / "cpu.png").stat().st_size and (tmp_path / "growth.png").stat().st_size


def test_only_tokens_of_largest_logits_pass_the_check():
    table = torch.tensor([[0.0, 2.0, 1.9995], [3.0, 0.0, 1.0], [0.0, 1.0, 5.0]])
    prompts = torch.tensor([[0]])
    for found in ([1, 0, 1], [2, 2]):
        check_greedy(lambda row: table[row], prompts, torch.tensor([found]))
    with pytest.raises(ValueError):
        check_greedy(lambda row: table[row], prompts, torch.tensor([[1, 2]]))


def test_sizes_of_growth():
    shape = shape_of(growth_shape("growth-train", "dim", 512))
    assert (shape.dim, shape.heads, shape.kv_heads, shape.length, shape.batch) == (
        512,
        16,
        8,
        256,
        4,
    )
    # embedding and head, norms; q and o, k and v, feed-forward
    layer = 2 * 512**2 + 2 * 512 * 256 + 3 * 512 * shape.ffn_dim + 2 * 512
    assert parameters(growth_shape("growth-train", "dim", 512)) == 2 * 4096 * 512 + 512 + 4 * layer


def test_different_results_are_refused():
    one, other = (Measured([], 1, [value], 0) for value in (1.0, 1.01))
    assert agreement("train", one, one) == "difference 0.0e+00"
    with pytest.raises(Exception, match="differ"):
        agreement("train", one, other)
