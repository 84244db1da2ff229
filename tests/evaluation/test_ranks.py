"""An evaluation on several processes gives the numbers of one process; rank 0 writes."""

import shutil
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from errors import EvaluationError
from evaluation.evaluate_runs import check_windows
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.ranks import EvaluationRanks, joined, refuse_silent_launch
from evaluation.scoring.text_loss import ModelScorer
from model import ContextShard
from tests import processes
from tests.evaluation.conftest import MemoryModel, loss_session

YARN = {"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}}
LENGTHS = (16, 32, 64)


class Numbers(NamedTuple):
    """What a process sends home of its result."""

    nll: dict
    failed: dict
    targets: str


@pytest.fixture
def measured(make_store, tokenizer, sharp, tmp_path):
    """A function that runs one small evaluation, here or as one of several processes."""
    store = make_store([90, 120, 75, 99, 130, 81, 77], seed=1)

    def run(ranks=None, cells="cells", spoil=None, must_be_stored=False, **more):
        model = sharp({"name": "rope"})
        subject = MemoryModel(model if spoil is None else spoil(model, ranks))
        if must_be_stored:
            subject.under = lambda *_: pytest.fail("measured again")
        settings = EvaluationSettings(
            methods=["trained", "yarn"],
            targets=5,
            spans_per_document=2,
            device="cpu",
            **{"lengths": LENGTHS} | more,
        )
        folder = tmp_path / cells
        result = loss_session(settings, subject, store, folder, ranks=ranks).run()
        return Numbers(result.nll, result.failed, result.plan.hash)

    return run


def equal(first, second) -> bool:
    """Whether two evaluations have the same losses, bit for bit."""
    if first.keys() != second.keys():
        return False
    return all(np.array_equal(losses, second[where]) for where, losses in first.items())


def together(world, work, context=1):
    """`work(ranks)` in `world` processes that form a group; their results or errors by rank."""

    def one():
        with joined(context) as ranks:
            return work(ranks)

    return processes.together(world, one)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_match_single_process_bitwise(measured, world, tmp_path):
    alone = measured(batch=2, cells="alone")
    results = together(world, lambda ranks: (ranks, measured(ranks, batch=2)))
    for rank, (ranks, result) in enumerate(results):
        assert (ranks.rank, ranks.world) == (ranks.local_rank, ranks.local_world) == (rank, world)
        assert result.targets == alone.targets
        assert equal(result.nll, alone.nll)
    # The cells on disk are those of one process as well, and nothing unfinished is left.
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "cells").iterdir()} == names
    assert len(names) == 5
    assert equal(measured(batch=2, must_be_stored=True).nll, alone.nll)


SHARED = {"context": 2, "batch": 2, "dtype": "float64", "documents": 3}
SHARED |= {"lengths": (16, 32), "chunk": 10}  # windows in several chunks per process


@pytest.mark.parametrize(
    ("world", "protocol", "more"),
    [
        (2, "fixed-targets", {}),
        (4, "fixed-targets", {}),
        (2, "sliding", {"stride": 16}),
        (2, "by-position", {"windows_per_document": 4}),
    ],
)
def test_processes_that_share_windows_match_a_single_process(
    measured, monkeypatch, world, protocol, more, tmp_path
):
    asked = SHARED | {"protocol": protocol} | more
    alone = measured(cells="alone", **asked | {"context": 1})
    read = counted_windows(monkeypatch)
    results = together(world, lambda ranks: (measured(ranks, **asked), sum(read)), context=2)
    for rank, (result, count) in enumerate(results):
        assert set(result.nll) == set(alone.nll)
        assert result.targets == alone.targets
        for where, nll in alone.nll.items():
            assert np.abs(result.nll[where] - nll).max() < 1e-10
            assert (result.nll[where] == results[0][0].nll[where]).all()
        if protocol == "fixed-targets":
            # 3 documents × 2 spans in each of three cells; two groups divide their batches of two.
            assert count == 3 * (6 if world == 2 else (4, 4, 2, 2)[rank])
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "cells").iterdir()} == names


def counted_windows(monkeypatch) -> list[int]:
    """Grows with every call of a scorer by the number of its windows."""
    counts = []
    call = ModelScorer.__call__

    def counted(self, windows, keep):
        counts.append(len(windows))
        return call(self, windows, keep)

    monkeypatch.setattr(ModelScorer, "__call__", counted)
    return counts


def interrupted_at(count: int):
    """`ModelScorer.__call__`, of which rank 1 is interrupted in its call `count`."""
    call = ModelScorer.__call__
    calls = []

    def interrupted(self, windows, keep):
        calls.append(1)
        if len(calls) == count and dist.get_rank() == 1:
            raise KeyboardInterrupt
        return call(self, windows, keep)

    return interrupted


def test_process_that_leaves_a_context_group_ends_the_others(measured, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(ModelScorer, "__call__", interrupted_at(2))
        first, second = together(2, lambda ranks: measured(ranks, **SHARED), context=2)
    assert isinstance(second, KeyboardInterrupt)
    assert isinstance(first, EvaluationError)
    assert "another process" in str(first)
    (part,) = (tmp_path / "cells").glob("partial-*")  # of the first rank of the group
    assert part.name.startswith("partial-0-")
    assert np.isfinite(np.load(part)["nll"]).sum() == 2 * 5
    alone = measured(cells="alone", **SHARED | {"context": 1})
    again = measured(**SHARED | {"context": 1})  # another number of processes continues
    for where, nll in alone.nll.items():
        assert np.abs(again.nll[where] - nll).max() < 1e-10


def test_processes_that_share_windows_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr(
        "evaluation.ranks.find_device", lambda wanted, local: torch.device("cuda", local)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ranks = EvaluationRanks(0, 2, local_world=2)
    assert ranks.device("auto").type == "cuda"  # each reads windows of its own
    with pytest.raises(EvaluationError, match=r"2 processes share .* 1 GPU.*device=cpu"):
        EvaluationRanks(0, 2, local_world=2, shard=ContextShard(0, 2, "")).device("auto")


def test_context_that_cannot_be_shared_is_refused(monkeypatch):
    for world, context, fix in (("1", 2, 2), ("3", 2, 4)):
        monkeypatch.setenv("WORLD_SIZE", world)
        with (
            pytest.raises(EvaluationError, match=f"context.*nproc_per_node {fix}"),
            joined(context),
        ):
            pytest.fail("joined")
    with pytest.raises(EvaluationError, match=r"context = 9 .*18 tokens"):
        check_windows(EvaluationSettings(lengths=[16, 32], context=9), 16)


def test_cell_failure_on_one_rank_fails_on_all(measured, monkeypatch):
    call = ModelScorer.__call__

    def broken(self, windows, keep):
        nll = call(self, windows, keep)
        bad = dist.get_rank() == 1 and self.length == 32
        return nll * np.nan if bad else nll

    monkeypatch.setattr(ModelScorer, "__call__", broken)
    first, second = together(2, lambda ranks: measured(ranks, batch=2))
    assert first.failed == second.failed
    assert set(first.failed) == {("trained", 32), ("yarn", 32)}
    assert "not finite" in first.failed["trained", 32]
    assert set(first.nll) == set(product(("trained", "yarn"), (16, 64)))


def test_exiting_rank_stops_others_and_rerun_resumes(measured, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(ModelScorer, "__call__", interrupted_at(3))
        first, second = together(2, lambda ranks: measured(ranks, batch=2))
    assert isinstance(second, KeyboardInterrupt)
    assert isinstance(first, EvaluationError)
    assert "another process" in str(first)
    parts = sorted((tmp_path / "cells").glob("partial-*"))
    assert [path.name.split("-")[1] for path in parts] == ["0", "1"]
    shutil.copytree(tmp_path / "cells", tmp_path / "again")
    asked = counted_windows(monkeypatch)
    again = measured(batch=2)
    # rank 0 had done its 4 batches of two, rank 1 two of its 3
    assert sum(asked) == 5 * 14 - 8 - 4
    alone = measured(batch=2, cells="alone")
    for result in (again, *together(2, lambda ranks: measured(ranks, batch=2, cells="again"))):
        assert equal(result.nll, alone.nll)
    for name in ("cells", "again"):
        files = [path.name for path in (tmp_path / name).iterdir()]
        assert len(files) == 5
        assert not any(file.startswith("partial-") for file in files)


def test_smallest_memory_budget_is_used(measured, monkeypatch):
    def work(ranks):
        free = 1 << 34 if ranks.main else 1 << 30
        monkeypatch.setattr("evaluation.scoring.cells.free_memory", lambda device: free)
        budgets = []
        monkeypatch.setattr(
            "evaluation.scoring.cells.choose_batch",
            lambda *a, **k: budgets.append(k["budget"]) or 2,
        )
        measured(ranks)
        return set(budgets)

    # Two processes on one machine: each may take half of 80% of what is free.
    assert together(2, work) == [{int(0.8 * (1 << 30) / 2)}] * 2


@pytest.mark.parametrize(
    "environment", [{"SLURM_STEP_NUM_TASKS": "4"}, {"OMPI_COMM_WORLD_SIZE": "2"}]
)
def test_uncoordinated_processes_are_rejected(environment):
    with pytest.raises(EvaluationError, match="torchrun --nproc_per_node"):
        refuse_silent_launch(environment)
    refuse_silent_launch(environment | {"WORLD_SIZE": "2"})
    refuse_silent_launch({"SLURM_STEP_NUM_TASKS": "1"})
