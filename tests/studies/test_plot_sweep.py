"""The best value on each line of a grid, against losses with known minima."""

import csv
import math

import pytest

from data.files import write_json
from errors import EvaluationError, StudyError
from scripts.plots import plot_sweep
from studies.results.stored import read_study

VALUES = ("0.04", "0.005", "0.01", "0.02")  # not in order
BEST = {("a", "32"): 0.02, ("a", "64"): 0.02, ("b", "32"): 0.02, ("b", "64"): 0.005}


def make_study(folder, missing=(), elsewhere=None):
    """Two schemes on a grid of width and rate, two seeds; parabolas over log2(rate)."""
    cells = []
    for (scheme, width), best in BEST.items():
        for rate in VALUES:
            for seed in ("0", "1"):
                axes = {"scheme": scheme, "width": width, "rate": rate, "seed": seed}
                record = {
                    "id": ",".join(f"{k}={v}" for k, v in axes.items()),
                    "axes": axes,
                    "status": "done",
                }
                nll = 2 + 0.1 * math.log2(float(rate) / best) ** 2 + 0.004 * int(seed)
                row = {
                    "method": "trained",
                    "length": 64,
                    "nll": nll,
                    "unit_nll": [nll - 0.5, nll + 0.5],
                }
                result = {
                    **{
                        "protocol": "fixed-targets",
                        "trained_length": 64,
                        "lengths": [64],
                        "cells": [row],
                    },
                    "units": {"kind": "document", "names": ["x", "y"], "targets": [8, 8]},
                    **{
                        "targets_hash": "u" if (width, rate) == elsewhere else "t",
                        "corpus_hash": "c",
                        "tokenizer_hash": "k",
                        "bos": "as-trained",
                    },
                    "dtype": "float32",
                }
                if (scheme, width, rate, seed) not in missing:
                    record["evaluations"] = {"held-out": result}
                cells.append(record)
    study = {"evaluations": {"held-out": {}}, "report": {}}
    write_json(folder / "results.json", {"format": 1, "name": "s", "study": study, "cells": cells})
    return folder


def test_the_best_value_of_each_line_and_their_distance_are_reported(tmp_path, monkeypatch, capsys):
    make_study(tmp_path)
    monkeypatch.setattr("sys.argv", ["plot_sweep.py", str(tmp_path)])
    assert plot_sweep.main() == 0
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    of_a, of_b = text.split("## a")[1].split("## b")
    assert "Best rate: the same.\n" in of_a
    assert (
        "Best rate: 2 steps of the grid apart, from 0.005 to 0.02. At width 64 it is the "
        "last value of the grid" in of_b
    )
    # By hand: log2 of 0.005, 0.01, 0.04 over 0.02 is −2, −1, 1; 0.002 is the seeds' mean.
    assert "| 32 | 2.402 | 2.102 | **2.002** | 2.102 | 0.02, 0.02 |" in of_a
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 32
    (one,) = [
        r
        for r in rows
        if (r["variant"], r["width"], r["rate"], r["seed"]) == ("b", "64", "0.04", "1")
    ]
    assert float(one["nll"]) == pytest.approx(2 + 0.1 * 9 + 0.004)
    for suffix in (".png", ".svg"):
        assert (tmp_path / f"sweep{suffix}").stat().st_size > 5_000


def test_a_missing_seed_is_reported(tmp_path):
    study = make_study(tmp_path, missing=[("b", "64", "0.01", "1")])
    with pytest.raises(StudyError, match=r"b, width=64, rate=0\.01: some seeds have no results"):
        plot_sweep.read_sweeps(
            read_study(plot_sweep.read_results(study)), "held-out", "rate", "width"
        )


def test_losses_on_different_targets_are_rejected(tmp_path):
    study = make_study(tmp_path, elsewhere=("64", "0.01"))
    with pytest.raises(
        EvaluationError, match=r"width=64, rate=0\.01 cannot be compared: targets_hash differs"
    ):
        plot_sweep.read_sweeps(
            read_study(plot_sweep.read_results(study)), "held-out", "rate", "width"
        )


@pytest.mark.parametrize(("over", "lines"), [("rate", "depth"), ("rate", "rate")])
def test_unknown_axes_are_rejected(tmp_path, over, lines):
    study = read_study(plot_sweep.read_results(make_study(tmp_path)))
    with pytest.raises(StudyError, match=r"are width, rate.*--over and --lines"):
        plot_sweep.read_sweeps(study, "held-out", over, lines)
