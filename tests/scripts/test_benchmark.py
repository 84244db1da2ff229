"""The benchmark's checks and table. Nothing is timed."""

import time
from concurrent.futures import Future
from dataclasses import replace

import pandas as pd
import pytest
import torch

from errors import TrainingError
from run_directory.console import Console
from scripts import benchmark
from scripts.benchmark import agreement
from scripts.workloads import CASES, Workload, check_greedy, comparisons

WORK = Workload("train", "tiny", "ours", "cpu", threads=1, repeats=1)


def test_every_case_runs_and_ours_agrees_with_the_baseline():
    for case in ("train", "train-8", "prefill", "decode-1", "fixed-targets", "scheme-train"):
        for variants in comparisons(case, "cpu", ["gated_deltanet"]):
            names = [name for name in variants if "compiled" not in name]
            names += ["llama"] if case.startswith("train") else []
            works = [replace(WORK, case=case, variant=name) for name in names]
            numbers = [CASES[case](work).call() for work in works]
            assert all(len(own) > 0 for own in numbers)
            for work, own in zip(works, numbers, strict=True):
                agreement(work, numbers[0], own)


def test_different_results_are_refused():
    table = torch.tensor([[0.0, 2.0, 1.9995], [3.0, 0.0, 1.0], [0.0, 1.0, 5.0]])
    prompts = torch.tensor([[0]])
    for tokens in ([1, 0, 1], [2, 2]):
        check_greedy(lambda ids: table[ids], prompts, torch.tensor([tokens]))
    with pytest.raises(ValueError):
        check_greedy(lambda ids: table[ids], prompts, torch.tensor([[1, 2]]))
    with pytest.raises(TrainingError, match="differ"):
        agreement(WORK, [1.0], [1.01])


class Process:
    """A measured process without one: `ours` is twice as fast and ends before its kernels are
    measured, `llama` ends in its first turn. Calls have a part up to the first token. `slow` is not
    warm in time."""

    def __init__(self, work: Workload):
        self.work = work
        self.facts: dict = {}
        self.turns: list[dict] = []
        self.kernels: list[dict] = []

    def warm_up(self, until: float) -> None:
        if self.work.variant == "slow":
            raise TrainingError("killed")
        self.facts = {"tokens": 30, "steps": 3, "checked": [1.0], "first_call": 7.0, "amount": 2}

    def turn(self, until: float) -> None:
        if self.work.variant == "llama":
            raise TrainingError("ended")
        seconds = 0.4 if self.work.variant == "ours" else 0.8
        calls = [(seconds, 2 * seconds), (2 * seconds, 4 * seconds), (seconds, 2 * seconds)]
        self.turns.append({"calls": calls, "firsts": [(0.1, 9.0)], "peak": 2**21})

    def end(self, until: float) -> None:
        if self.work.variant == "ours":
            raise TrainingError("ended")
        self.kernels = [{"kernel": name, "calls": 2, "ms": ms} for name, ms in (("a", 3), ("b", 1))]

    def close(self) -> None:
        pass


def test_a_peak_is_measured_once_before_the_variants(monkeypatch):
    started = []

    class Started(Process):
        def __init__(self, work):
            super().__init__(work)
            started.append(work.case)

    class Pool:
        def __init__(self, processes, context):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, rate, device, threads):
            started.append(rate.__name__)
            future = Future()
            future.set_result(5.0)
            return future

    monkeypatch.setattr(benchmark, "MeasuredProcess", Started)
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", Pool)
    benchmark.alone.cache_clear()
    for case, device in (("prefill", "cuda"), ("decode-1", "cuda"), ("decode-8", "cuda")):
        works = [replace(WORK, case=case, device=device, variant=name) for name in ("a", "b")]
        rows = benchmark.compare(works, 1).rows
        assert all(row["of_the_peak"] is not None for row in rows) == (case != "prefill")
    benchmark.compare([WORK], 1)
    assert started == [
        *["prefill", "prefill"],
        *["byte_rate", "decode-1", "decode-1", "decode-8", "decode-8"],
        *["flop_rate", "train"],
    ]
    benchmark.alone.cache_clear()


def test_results_of_variants_that_are_measured_in_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "MeasuredProcess", Process)
    monkeypatch.setattr(benchmark, "alone", lambda rate, device, threads: 200)
    names = ["transformers", "llama", "ours"]
    works = [replace(WORK, variant=name) for name in names]
    file = tmp_path / "cpu.csv"
    for count in (1, 2):
        found = benchmark.compare_and_save(
            works[:count], 2, Console(quiet=True), file, "one", first_calls={"transformers": 5.0}
        )
        assert [row["variant"] for row in found.rows] == ["transformers"]
        assert found.rows[0]["first_call_s"] == 5
        assert list(found.errors) == names[1:count]
    found = benchmark.compare_and_save(works, 2, Console(quiet=True), file, "one")
    assert [row["variant"] for row in found.rows] == ["transformers", "ours"]
    assert found.errors.keys() == {"llama", "ours"}
    table = pd.read_csv(file).set_index("variant")
    assert list(table.index) == ["transformers", "ours"]
    ours = table.loc["ours"]
    assert ours["ratio"] == 2 and ours["samples"] == 6 and ours["busy"] == 0.5
    assert ours["ms"] == 100 and ours["first_token_ms"] == 100 and ours["first_call_s"] == 7
    assert ours["of_the_peak"] == 0.1 and ours["peak_mib"] == 2
    assert table.loc["transformers", "kernels_ms"] == 4
    kernels = pd.read_csv(tmp_path / "cpu_kernels.csv")
    assert list(kernels["share"]) == [0.75, 0.25]


def test_a_slow_warm_up_does_not_take_the_turns_of_others(monkeypatch):
    monkeypatch.setattr(benchmark, "MeasuredProcess", Process)
    monkeypatch.setattr(benchmark, "alone", lambda rate, device, threads: 200)
    works = [replace(WORK, variant=name) for name in ("slow", "transformers")]
    found = benchmark.compare(works, 2, seconds=1000)
    (row,) = found.rows
    assert row["variant"] == "transformers" and row["samples"] == 6 and row["ratio"] is None
    assert found.errors == {"slow": "killed"}


def test_a_process_answers_its_turns_and_says_why_it_has_no_answer():
    hour = time.monotonic() + 3600
    works = [WORK, replace(WORK, variant="unknown", case="unknown"), WORK]
    processes = [benchmark.MeasuredProcess(work) for work in works]
    warm, failed, late = processes
    try:
        with pytest.raises(TrainingError, match="time"):
            late.warm_up(0.0)
        with pytest.raises(TrainingError, match="KeyError: 'unknown'"):
            failed.warm_up(hour)
        warm.warm_up(hour)
        warm.turn(hour)
        ((cpu, wall),) = warm.turns[0]["calls"]
        assert cpu > 0 and wall > 0 and warm.turns[0]["firsts"] == []
        warm.end(hour)
        assert warm.kernels == []
        with pytest.raises(TrainingError, match="status 0"):
            warm.turn(hour)
    finally:
        for process in processes:
            process.close()
