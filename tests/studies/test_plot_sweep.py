"""The best value on each line of a grid, against losses with known minima."""

import math

import pytest

from data.files import write_json
from errors import EvaluationError, StudyError
from scripts.plots import plot_sweep
from studies.results.stored import read_study

VALUES = ("0.04", "0.005", "0.01", "0.02")  # not in order
BEST = {("a", "32"): 0.02, ("a", "64"): 0.02, ("b", "32"): 0.02, ("b", "64"): 0.005}


@pytest.fixture
def study() -> dict:
    """Two schemes on a grid of width and rate, two seeds; parabolas over log2(rate)."""
    cells = []
    for (scheme, width), best in BEST.items():
        for rate in VALUES:
            for seed in ("0", "1"):
                nll = 2 + 0.1 * math.log2(float(rate) / best) ** 2 + 0.004 * int(seed)
                row = {"method": "trained", "length": 64, "nll": nll}
                result = {
                    "protocol": "fixed-targets",
                    "trained_length": 64,
                    "lengths": [64],
                    "cells": [row | {"unit_nll": [nll - 0.5, nll + 0.5]}],
                    "units": {"kind": "document", "names": ["x", "y"], "targets": [8, 8]},
                    "targets_hash": "t",
                    "corpus_hash": "c",
                    "tokenizer_hash": "k",
                    "bos": "as-trained",
                }
                axes = {"scheme": scheme, "width": width, "rate": rate, "seed": seed}
                name = ",".join(axes.values())
                evaluations = {"held-out": result}
                cells.append(
                    {"id": name, "axes": axes, "status": "done", "evaluations": evaluations}
                )
    return {"format": 1, "name": "s", "study": {"evaluations": {"held-out": {}}}, "cells": cells}


def test_the_best_value_of_each_line_is_reported(study, tmp_path, capsys):
    write_json(tmp_path / "results.json", study)
    assert plot_sweep.main([str(tmp_path)]) == 0
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    of_a, of_b = text.split("## a")[1].split("## b")
    assert "the same" in of_a and "2 steps of the grid apart, from 0.005 to 0.02" in of_b
    # By hand: log2 of 0.005, 0.01, 0.04 over 0.02 is −2, −1, 1; 0.002 is the seeds' mean.
    assert "| 32 | 2.402 | 2.102 | **2.002** | 2.102 | 0.02, 0.02 |" in of_a
    assert "b,64,0.04,1,2.904" in (tmp_path / "sweep.csv").read_text(encoding="utf-8")
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda cell: cell.pop("evaluations"), StudyError, "a, width=64, rate=0.02"),
        (
            lambda cell: cell["evaluations"]["held-out"].update(targets_hash="u"),
            EvaluationError,
            "targets_hash differs",
        ),
    ],
)
def test_incomplete_or_incomparable_cells_are_rejected(study, change, error, words):
    for cell in study["cells"]:
        if (cell["axes"]["width"], cell["axes"]["rate"]) == ("64", "0.02"):
            change(cell)
    with pytest.raises(error, match=words):
        plot_sweep.read_sweeps(read_study(study), "held-out", "rate", "width")


@pytest.mark.parametrize(("over", "lines"), [("rate", "depth"), ("rate", "rate")])
def test_unknown_axes_are_rejected(study, over, lines):
    with pytest.raises(StudyError, match="--over and --lines"):
        plot_sweep.read_sweeps(read_study(study), "held-out", over, lines)
