"""The check of a GPU: its plan, its verdicts, and all of it with tiny models on a CPU."""

import subprocess
import sys
from dataclasses import asdict

import pandas as pd
import pytest
import yaml

from scripts import gpu_acceptance
from scripts.benchmark import Comparison
from scripts.gpu_acceptance import AIMS, judged, summary_of, workloads
from scripts.workloads import CASES, SHAPES
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

    reasons = {("train", "A", "rope"): "failed", ("train", "tiny", "alibi"): "no time"}

    def verdict(quantity: str, limit: str, rows: list[dict], shape=None) -> list[str]:
        results = reasons | {("train", "A", row["variant"]): row for row in rows}
        (line,) = judged([{**aim, "quantity": quantity, "aim": limit}], results, shape)
        return [line[4], line[6]]

    both = [baseline, row]
    assert verdict("ms", "<= 20", both) == ["20", "ok"]
    assert verdict("ms", "<= 19", both) == ["20", "short"]
    assert verdict("ratio", ">= 0.9", both) == ["0.8", "short"]
    assert verdict("per_kernel", ">= 0.95", both) == ["0.95", "ok"]
    assert verdict("per_kernel", ">= 0.95", [row]) == ["", "not run: failed"]
    assert verdict("ms", "<= 20", both, "tiny") == ["", "not run: no time"]
    assert verdict("of_the_peak", ">= 0.5", both)[1].startswith("not run")


def test_summary_of_a_log_that_is_cut():
    log = """8 workers [5 items]
[gw1] [ 20%] PASSED tests/a.py::test_x[rope-cuda]
[gw0] [ 40%] FAILED tests/a.py::test_y
tests/a.py::test_z
[gw0] [ 60%] SKIPPED tests/b.py::test_z
"""
    shown, failed = summary_of(log)
    assert sorted(shown.split(", ")) == ["1 failed", "1 passed", "1 skipped", "2 not run"]
    assert failed == ["tests/a.py::test_y"]
    assert summary_of("") == ("none ran", [])


@pytest.mark.parametrize("seconds", [1000, 1])
def test_every_aim_gets_a_line(seconds, call, tmp_path, monkeypatch, capsys):
    """The last variant of each piece fails; within a second, nothing is measured."""
    numbers = dict.fromkeys(["ms", "ratio", "of_the_peak", "first_call_s"], 0.5)

    def measure(works, rounds, console, file, machine, limit, first_calls) -> Comparison:
        *measured, last = works
        rows = [
            {**asdict(work), **numbers, "baseline": "", "kernels_ms": None} for work in measured
        ]
        return Comparison(rows, [], {last.variant: "it failed"})

    def test(rehearse, limit, log) -> int:
        log.write_text("", encoding="utf-8")
        return 0

    monkeypatch.setattr(gpu_acceptance, "compare_and_save", measure)
    monkeypatch.setattr(gpu_acceptance, "run_tests", test)
    monkeypatch.setattr(gpu_acceptance, "compile_first", lambda work, until: None)
    for name in (
        "HF_HUB_OFFLINE",
        "OMP_NUM_THREADS",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCH_COMPILE_DISABLE",
        "ACCELERATE_USE_CPU",
    ):  # restored after the test
        monkeypatch.setenv(name, "")
    words = ["--rehearse", "--seconds", seconds, "--results", tmp_path]
    assert call(gpu_acceptance.main, *words) == int(seconds > 1)
    table = (tmp_path / "cpu_aims.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    if seconds == 1:
        assert table.count("not run: no time") == len(PLAN["aims"])
    else:
        verdicts = [table.count(f"| {verdict}") for verdict in ("ok ", "short ", "not run: ")]
        assert sum(verdicts) == len(PLAN["aims"]) and min(verdicts) > 0
        assert "it failed" in table


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
