"""The check of a GPU: its plan, its verdicts, and all of it with tiny models on a CPU."""

import subprocess
import sys

import pandas as pd
import pytest
import yaml

from scripts.benchmark import CASES, SHAPES
from scripts.gpu_acceptance import AIMS, judged, workloads
from tests.files import ROOT

PLAN = yaml.safe_load(AIMS.read_text(encoding="utf-8"))


def test_every_aim_is_measured_by_a_piece():
    measured = set()
    for piece in PLAN["pieces"]:
        assert piece["case"] in CASES and piece["shape"] in SHAPES
        assert piece["seconds"] <= 60
        works = workloads(piece, "cuda", rehearse=False)
        measured |= {(work.case, work.shape, work.variant) for work in works}
    assert {(x["case"], x["shape"], x["variant"]) for x in PLAN["aims"]} <= measured


def test_verdicts():
    aim = {"case": "train", "shape": "A", "variant": "alibi", "source": ""}
    row = {**aim, "baseline": "rope", "ms": 20.0, "ratio": 0.8, "kernels_ms": 10.0}
    baseline = {**row, "variant": "rope", "kernels_ms": 9.5}

    def verdict(quantity: str, limit: str, rows: list[dict], shape=None) -> list[str]:
        (line,) = judged([{**aim, "quantity": quantity, "aim": limit}], rows, shape)
        return [line[4], line[6]]

    both = [baseline, row]
    assert verdict("ms", "<= 20", both) == ["20", "ok"]
    assert verdict("ms", "<= 19", both) == ["20", "short"]
    assert verdict("ratio", ">= 0.9", both) == ["0.8", "short"]
    assert verdict("per_kernel", ">= 0.95", both) == ["0.95", "ok"]
    assert verdict("per_kernel", ">= 0.95", [row]) == ["", "not run"]
    assert verdict("ms", "<= 20", both, "tiny") == ["", "not run"]
    assert verdict("of_the_peak", ">= 0.5", both) == ["", "not run"]


@pytest.mark.slow
def test_rehearsal_measures_every_aim(tmp_path):
    """On the CPU, with the tests' own cases for it. Every verdict is ok or short."""
    command = [sys.executable, "scripts/gpu_acceptance.py", "--rehearse", "--seconds", "3000"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "not run" not in done.stdout
    assert done.stdout.count("| ok |") + done.stdout.count("| short |") == len(PLAN["aims"])
    kernels = pd.read_csv(tmp_path / "cpu_kernels.csv")
    assert kernels.groupby(["case", "variant"])["share"].sum().between(0.5, 1.001).all()
    assert (tmp_path / "cpu_aims.md").read_text(encoding="utf-8").count("\n") > len(PLAN["aims"])
    assert " passed" in (tmp_path / "cpu_tests.txt").read_text(encoding="utf-8")
