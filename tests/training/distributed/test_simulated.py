"""Collectives of simulated processes: as many, and as large, as those of processes that exist."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout

import pytest

from errors import TrainingError
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.training.distributed.curves import Training, afresh, shared
from train import train_step
from training.distributed.simulated import (
    CollectiveCounter,
    Collectives,
    SimulatedParallel,
    Traffic,
    count_collectives,
    sent_bytes,
)
from training.dry_run import dry_run
from training.options import parse_options
from training.schedule import TrainingSchedule

SMALL = [
    *("train_length=24", "model.dim=32", "model.layers=1", "model.heads=4", "model.kv_heads=2"),
    *("training.batch_size=4", "training.tokens=8k", "training.precision=float32"),
    *("training.validation.targets=8", "data.tokenizer.name=bytes", "data.root=none"),
]
SHARDED = "training.parallel.sharding=full"
CONTEXT = "training.parallel.context=2"
PACKED = "data.packing=intra_document"
RECOMPUTED = "training.parallel.activation_checkpointing=true"
QUICK = {
    "context": [CONTEXT, PACKED],
    "fsdp and context": [CONTEXT, SHARDED, RECOMPUTED, PACKED, "training.micro_batch_size=3"],
}
CASES = {
    **QUICK,
    "ddp": ["training.micro_batch_size=1"],
    "fsdp": [SHARDED, "training.micro_batch_size=1"],
    "fox": [CONTEXT, SHARDED, "model.position.name=fox"],
    "window": [CONTEXT, "model.position.window=5"],
    "sinks": [CONTEXT, PACKED, "model.position={name: rope, window: 5, sinks: 2}"],
}


def simulated(overrides: list[str], world: int, vocab_size: int) -> Collectives:
    settings = load_settings(RunSettings, [*SMALL, *overrides])
    parallel = SimulatedParallel(settings.training, world)
    schedule = TrainingSchedule(settings)
    stage = schedule.stage(0)
    size = schedule.micro_batch_size(stage)
    return count_collectives(settings, parallel, stage, size, vocab_size, train_step)


def measured(overrides: list[str], prepared) -> Collectives:
    """Those of the first step of this process."""
    training = Training([*SMALL, *overrides], prepared)
    shard = training.parallel.shard
    with CollectiveCounter(shard.group if shard else None) as counter:
        training.step(0)
    return counter.counts


def simulations(cases: dict[str, tuple[list[str], int]], prepared=None) -> dict[str, Collectives]:
    """In a process of their own."""
    vocab_size = prepared.tokenizer.vocab_size if prepared else 256

    def one(case: list[str], world: int) -> Collectives:
        os.environ["WORLD_SIZE"] = "1"
        return afresh(lambda: simulated(case, world, vocab_size))

    return shared(1, lambda: {name: one(*case) for name, case in cases.items()})[0]


def in_context(found: Collectives) -> Collectives:
    """With those of context groups in one sum: gloo's gathers are all-to-alls."""
    merged: Collectives = {}
    for (operation, group), traffic in found.items():
        key = ("any" if group == "context" else operation, group)
        before = merged.get(key, Traffic())
        merged[key] = Traffic(before.count + traffic.count, before.nbytes + traffic.nbytes)
    return merged


def compare(world: int, prepared, cases: dict[str, list[str]]) -> None:
    ranks = shared(world, lambda: {name: measured(case, prepared) for name, case in cases.items()})
    expected = simulations({name: (case, world) for name, case in cases.items()}, prepared)
    assert all(expected[name] for name in cases)
    for rank in ranks:
        assert all(in_context(rank[name]) == in_context(expected[name]) for name in cases)


def test_collectives_equal_those_of_two_processes(prepared):
    compare(2, prepared, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_collectives_of_every_case_equal_those_of_processes(prepared, world):
    compare(world, prepared, CASES | {"one group": [f"training.parallel.context={world}", SHARDED]})


def test_collectives_of_ddp_fsdp_and_context_parallelism():
    """By hand: a layer with B parameters, three micro-batches in eight processes, context groups of
    two."""
    case = ["training.batch_size=12", "training.micro_batch_size=1", SHARDED, CONTEXT]
    found = simulations({"": (case, 8)})[""]
    ffn_dim = load_settings(RunSettings, SMALL).model.ffn_dim
    block = 32 * (2 * 32 + 2 * 16) + 3 * 32 * ffn_dim + 2 * 32
    outer = 2 * 256 * 32 + 32
    # float32; blocks are gathered in each direction, the other weights once.
    assert found["all-gather", "all"] == (3 * 3, 3 * 4 * (2 * block + outer))
    assert found["reduce-scatter", "all"] == (3 * 2, 3 * 4 * (block + outer))
    # of heads and tails, keys and values: 24 tokens × 2 × 16 numbers
    keys = 3 * 4, 3 * 24 * 2 * 16 * 4
    assert found["all-gather", "context"] == found["reduce-scatter", "context"] == keys


def test_bytes_sent_in_a_ring():
    assert sent_bytes("all-gather", 800, 8) == sent_bytes("reduce-scatter", 800, 8) == 700
    assert sent_bytes("all-reduce", 800, 8) == 1400


def test_dry_run_prints_communication_of_each_stage():
    stages = "training.stages=[{length: 12, duration: 0.5}, {length: 24}]"
    words = [*SMALL, stages, CONTEXT, "--dry-run", "--world", "4"]

    def work() -> str:
        text = io.StringIO()
        with redirect_stdout(text):
            assert dry_run(parse_options("", words), train_step) == 0
        return text.getvalue()

    (printed,) = shared(1, work)
    rows = [line.split("│")[1:-1] for line in printed.splitlines() if "2 (context)" in line]
    found = [[cell.strip() for cell in row[:5]] for row in rows]
    # Two groups of 4 / 2 windows: in float32, tokens × 2 × 16 numbers.
    assert found == [
        [windows, operation, "2 (context)", "4", size]
        for windows, size in (("8 × 12", "6,144"), ("4 × 24", "6,144"))
        for operation in ("all-gather", "reduce-scatter")
    ]


def test_processes_that_cannot_be_simulated_are_refused(monkeypatch):
    settings = load_settings(RunSettings, [*SMALL, CONTEXT])
    with pytest.raises(TrainingError, match=r"context = 2 does not divide .* 3"):
        shared(1, lambda: SimulatedParallel(settings.training, 3))
    with pytest.raises(TrainingError, match="--dry-run"):
        parse_options("", ["--world", "4"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="without a launcher"):
        SimulatedParallel(settings.training, 4)
