"""Waiting for data with a simulated second process. Real processes: distributed/test_streams.py."""

import errno
import threading
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from data import DataError
from errors import INTERRUPTED, REQUEUE, TrainingError
from training import batches as module
from training.batches import Prefetcher

THERE = (True, 0, None)
NOT_YET = (False, 0, None)


class Fetched(str):
    """A batch; pinned in the thread that reads it."""

    def pinned(self):
        assert threading.current_thread() is not threading.main_thread()
        return f"pinned {self}"


class World:
    """Two processes; three steps draw on each group. `others`: what the other one says at each look."""

    def __init__(self, others, ready=lambda line: True):
        self.others = list(others)
        self.ready = ready
        self.looks = []
        self.messages = []
        self.fetched = []
        self.checked = []
        self.watched = 0
        self.interrupts = SimpleNamespace(status=0)
        self.rank = 0
        self.main = True
        self.asked = 0

    def prefetcher(self, used=(), device="cpu"):
        batches = SimpleNamespace(
            is_within=lambda step, line: step // 3 <= line,
            has_stream=self.has_stream,
            check_groups=lambda used: self.checked.append(used) if used else None,
            batch=self.batch,
        )
        parallel = SimpleNamespace(
            rank=0,
            data_rank=0,
            data_world=2,
            main=True,
            gather=self.gather,
            device=torch.device(device),
        )
        console = SimpleNamespace(info=self.info)
        watchdog = SimpleNamespace(collective=self.together)
        logger = SimpleNamespace(read=self.read, resume_clock=lambda: self.looks.append("clock"))
        run = SimpleNamespace(
            batches=batches,
            parallel=parallel,
            interrupts=self.interrupts,
            watchdog=watchdog,
            console=console,
        )
        return Prefetcher(run, logger, list(used))  # pyright: ignore

    def batch(self, step, rank, world):
        self.fetched.append(step)
        return Fetched(f"batch {step}")

    def read(self):
        self.looks.append("read")
        return self.asked

    def on_gather(self, left):
        pass

    def info(self, text):
        assert self.watched == 0  # nor is what comes between looks
        self.messages.append(text)

    def has_stream(self, line, verify):
        assert verify
        self.looks.append(line)
        return self.ready(line)

    def gather(self, mine):
        assert self.watched == 1
        self.on_gather(len(self.others))
        return [mine, self.others.pop(0) if self.others else THERE]

    @contextmanager
    def together(self, what):
        self.watched += 1
        yield
        self.watched -= 1


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.001)
    monkeypatch.setattr(module, "PATIENCE", 0.0055)


def test_batches_are_pinned_for_a_gpu_only():
    for device, kind in (("cpu", ""), ("cuda", "pinned ")):
        assert [batch for _, batch in World([]).prefetcher(device=device).batches(0, 3)] == [
            f"{kind}batch {step}" for step in range(3)
        ]


def test_a_slow_read_delays_no_earlier_step(monkeypatch):
    world = World([])
    slow = threading.Event()
    asked = []
    read = world.batch

    def batch(step, rank, ranks):
        assert step != 2 or slow.wait(60)
        return read(step, rank, ranks)

    class RecordingQueue(SimpleQueue):
        def put(self, item):
            if isinstance(item, int):
                asked.append(item)
            super().put(item)

    monkeypatch.setattr(world, "batch", batch)
    monkeypatch.setattr(module, "SimpleQueue", RecordingQueue)
    prefetcher = world.prefetcher()
    prefetcher._batches.is_within = lambda step, line: True
    for step, _ in prefetcher.batches(0, 9):
        assert asked == list(range(min(step + module.AHEAD, 8) + 1))
        if step == 1:
            assert world.fetched == [0, 1]
            slow.set()
    assert world.fetched == list(range(9))


def test_ranks_synchronize_once_per_group():
    world = World([])
    prefetcher = world.prefetcher(["a", "b"])
    ahead = []
    for step, batch in prefetcher.batches(4, 11):
        assert batch == f"batch {step}"
        world.looks.append(f"step {step}")
        ahead.append(step)
    # waits are no time of steps
    first, second, third = (["read", line, "clock"] for line in (1, 2, 3))
    steps = [f"step {step}" for step in range(4, 11)]
    assert world.looks == [*first, *steps[:2], *second, *steps[2:5], *third, *steps[5:]]
    assert world.fetched == ahead == list(range(4, 11)) and prefetcher.status == 0
    assert world.checked == [["a", "b"]] and world.messages == []


def test_waiting_for_other_ranks_is_not_timed():
    world = World([NOT_YET] * 3)
    assert [step for step, _ in world.prefetcher().batches(3, 4)] == [3]
    assert world.looks == ["read", *[1] * 4, "clock"] and world.messages == [
        "waiting for group 1 of the text to be prepared"
    ]
    late = World([], ready=lambda line: len(late.looks) > 30)  # nobody has it for long
    late.others = [NOT_YET] * 30
    assert [step for step, _ in late.prefetcher().batches(3, 4)] == [3]


@pytest.mark.parametrize(
    ("mine", "other", "status"),
    [
        (0, REQUEUE, REQUEUE),
        (INTERRUPTED, 0, INTERRUPTED),
        (INTERRUPTED, REQUEUE, REQUEUE),
        (REQUEUE, INTERRUPTED, REQUEUE),
    ],
)
def test_signal_to_any_rank_stops_all_with_same_status(mine, other, status):
    world = World([(True, other, None)])
    world.interrupts.status = mine
    prefetcher = world.prefetcher()
    assert [step for step, _ in prefetcher.batches(0, 9)] == [0, 1, 2]
    assert prefetcher.status == status and world.fetched == [0, 1, 2]


def test_error_on_one_rank_is_raised_on_all():
    with pytest.raises(DataError, match="process 1 failed: the disk is gone"):
        list(World([(False, 0, "the disk is gone")]).prefetcher().batches(3, 9))

    def damaged(line):
        raise DataError("group 1 is damaged")

    with pytest.raises(DataError, match=r"^group 1 is damaged$"):
        list(World([], damaged).prefetcher().batches(3, 9))


def test_pending_signal_is_handled_before_waiting():
    world = World([], ready=lambda line: False)
    world.asked = REQUEUE
    prefetcher = world.prefetcher()
    assert [step for step, _ in prefetcher.batches(2, 9)] == [2]
    assert prefetcher.status == REQUEUE and world.looks == ["read"]


def test_file_checks_are_not_timed_and_handle_signals():
    begun = threading.Event()
    done = threading.Event()

    def slow(line):
        begun.set()
        return done.wait(9)

    world = World([THERE] * 40, slow)  # longer than what one sees may be unseen by others
    world.on_gather = lambda left: done.set() if left == 10 else None
    assert [step for step, _ in world.prefetcher().batches(3, 4)] == [3]
    assert begun.is_set() and world.looks.count(1) == 1 and len(world.others) <= 10
    world = World([THERE] * 40, slow)
    done = threading.Event()
    world.on_gather = lambda left: setattr(world.interrupts, "status", REQUEUE if left < 30 else 0)
    prefetcher = world.prefetcher()
    assert (
        list(prefetcher.batches(3, 9)) == [] and prefetcher.status == REQUEUE and not done.is_set()
    )
    done.set()


@pytest.mark.parametrize(
    "error", [OSError(errno.ESTALE, "Stale file handle"), ValueError("Expecting value")]
)
def test_transient_disk_errors_are_retried(error):
    def fails(times):
        def ready(line):
            if len(world.looks) <= times:
                raise error
            return True

        world = World([], ready)
        return world

    assert [step for step, _ in fails(3).prefetcher().batches(3, 4)] == [3]
    with pytest.raises(DataError, match=r"group 1 of the text .*(handle|value)"):
        list(fails(99).prefetcher().batches(3, 4))


def test_missing_data_on_one_rank_raises():
    with pytest.raises(TrainingError, match=r"group 1 .* process 1 .* data.root"):
        list(World([NOT_YET] * 99).prefetcher().batches(3, 9))


def test_errors_of_the_reading_thread_are_raised_at_their_step(monkeypatch):
    world = World([])
    threads = threading.active_count()

    def batch(step, rank, world):
        if step == 1:
            raise OSError(errno.EIO, "a bad block")
        return f"batch {step}"

    monkeypatch.setattr(world, "batch", batch)
    batches = world.prefetcher().batches(0, 3)
    assert next(batches) == (0, "batch 0")
    with pytest.raises(OSError, match="a bad block"):
        next(batches)
    assert threading.active_count() == threads
