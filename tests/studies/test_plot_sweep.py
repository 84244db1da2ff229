"""The best value on each line of a grid, against losses with known minima."""

import math

import pandas as pd
import pytest

from errors import StudyError
from scripts.plots import plot_sweep

VALUES = ("0.04", "0.005", "0.01", "0.02")  # not in order
BEST = {
    ("a", "32"): 0.02,
    ("a", "64"): 0.02,
    ("b", "32"): 0.02,
    ("b", "64"): 0.005,
}


@pytest.fixture
def rows() -> pd.DataFrame:
    """results.csv: two schemes, a grid of width and rate, two seeds; parabolas over log2(rate)."""
    records = []
    for (variant, width), best in BEST.items():
        for rate in VALUES:
            for seed in ("", "0", "1"):
                nll = 2 + 0.1 * math.log2(float(rate) / best) ** 2 + 0.004 * int(seed or 0)
                place = {"study": "s", "evaluation": "held-out", "width": width, "rate": rate}
                metric = {"variant": variant, "metric": "nll_as_trained", "seed": seed}
                records.append({**place, **metric, "value": nll, "targets_hash": "t"})
    return pd.DataFrame(records)


@pytest.fixture
def plot(tmp_path):
    def run(rows: pd.DataFrame) -> str:
        rows.to_csv(tmp_path / "results.csv", index=False)
        assert plot_sweep.main([str(tmp_path)]) == 0
        return (tmp_path / "sweep.md").read_text(encoding="utf-8")

    return run


def test_the_best_value_of_each_line_is_reported(rows, plot, tmp_path):
    text = plot(rows)
    # By hand: log2 of 0.005, 0.01, 0.04 over 0.02 is −2, −1, 1; 0.002 is the seeds' mean.
    assert "| 32 | 2.402 | 2.102 | **2.002** | 2.102 | 0.02, 0.02 |" in text
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "no results"),
        (lambda rows: rows[rows.metric == ""], "no results"),
        (lambda rows: rows.assign(targets_hash=rows.width), "targets_hash"),
        (lambda rows: rows.rename(columns={"width": "depth"}), "rate and width"),
    ],
)
def test_unusable_results_are_rejected(rows, plot, change, message):
    with pytest.raises(StudyError, match=message):
        plot(change(rows))
