"""Reads the batches of a run ahead of time in a thread.

Where text is still being prepared, all processes wait for it together and still react to signals. Which steps
read a further group of text depends only on the groups before it, so every process waits at the same steps,
and the other steps need no communication.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from data import Batch, DataError
from errors import INTERRUPTED, REQUEUE, TrainingError
from training.logging.metrics_logger import MetricsLogger
from training.run.setup import TrainingRun

POLL_INTERVAL = 0.2  # seconds
AHEAD = 2  # batches read during a step, so that one that takes long does not delay training
PATIENCE = 60.0  # seconds until all processes must see a group that one sees, or read a shared disk
T = TypeVar("T")


class Prefetcher:
    """Reads batches ahead in a thread, and waits for text that is not prepared yet.

    used: hashes of the text groups that the steps before the first one read.
    status: exit status that any process requested before or while they waited; 0: none.
    """

    def __init__(self, run: TrainingRun, logger: MetricsLogger, used: list[str]):
        self.status = 0
        self._run = run
        self._batches = run.batches
        self._parallel = run.parallel
        self._logger = logger
        self._used = used
        self._group = 0  # the last text group that all processes can read
        self._check: Future[bool] | None = None  # of a check that is running
        self._failed = 0  # consecutive checks that failed to read the disk

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, Batch]]:
        """(step, this process's batch) for each step; the next ones are read during the current step. Ends
        early with a `status`. Raises DataError or TrainingError, on all processes, where text cannot be
        prepared or is not what was `used`."""
        # An executor would cost the consumer about 60 microseconds per step.
        wanted: SimpleQueue[int | None] = SimpleQueue()
        read: SimpleQueue[Batch | BaseException] = SimpleQueue()
        reader = threading.Thread(target=self._read, args=(wanted, read), daemon=True)
        reader.start()
        asked = start - 1
        try:
            for step in range(start, stop):
                if not self._wait(step):
                    return
                while asked < min(step + AHEAD, stop - 1) and self._batches.is_within(
                    asked + 1, self._group
                ):
                    wanted.put(asked := asked + 1)
                batch = read.get()
                if isinstance(batch, BaseException):
                    raise batch
                yield step, batch
        finally:
            wanted.put(None)
            reader.join()

    def _read(
        self, wanted: "SimpleQueue[int | None]", read: "SimpleQueue[Batch | BaseException]"
    ) -> None:
        while (step := wanted.get()) is not None:
            try:
                read.put(self._fetch(step))
            except BaseException as error:
                read.put(error)

    def _fetch(self, step: int) -> Batch:
        batch = self._batches.batch(step, self._parallel.data_rank, self._parallel.data_world)
        return batch.pinned() if self._parallel.device.type == "cuda" else batch

    def _wait(self, step: int) -> bool:
        """Wait until a step's text is available on all processes; False: stop with `status` instead."""
        while not self._batches.is_within(step, self._group):
            self.status = self._logger.read()  # the wait may be long
            if self.status or not self._wait_for(self._group + 1):
                return False
            self._group += 1
            self._logger.resume_clock()
        self._batches.check_groups(self._used)
        self._used = []
        return True

    def _wait_for(self, group: int) -> bool:
        polls = disagreements = 0
        while True:
            own = self._poll(group)
            with self._run.watchdog.collective("waiting for text"):
                found = self._parallel.gather(own)
            _raise_fault([fault for *_, fault in found], self._parallel.rank)
            statuses = {status for _, status, _ in found} - {0}
            if statuses:
                self.status = REQUEUE if REQUEUE in statuses else INTERRUPTED
                return False
            missing = [rank for rank, (ready, *_) in enumerate(found) if not ready]
            if not missing:
                return True
            unreadable = [rank for rank in missing if found[rank][0] is False]
            disagreements += bool(unreadable) and len(missing) < len(found)
            if disagreements * POLL_INTERVAL > PATIENCE and unreadable:
                raise TrainingError(
                    f"group {group} of the text is prepared, but process {unreadable[0]} cannot read it: "
                    "data.root must be on a disk that all processes share"
                )
            if not polls:
                self._run.console.info(f"waiting for group {group} of the text to be prepared")
            polls += 1
            time.sleep(POLL_INTERVAL)

    def _poll(self, group: int) -> tuple[bool | None, int, str | None]:
        """Whether a group is available, None while that is being checked; the exit status requested here; and
        an error that makes the group unusable.

        A check may take long, as it compares files with their hashes; it runs in a thread between calls.
        """
        if self._check is None:
            self._check = in_thread(
                partial(self._batches.has_stream, group, verify=self._parallel.main)
            )
        wait_for([self._check], POLL_INTERVAL)
        ready = None
        fault = None
        if self._check.done():
            answer = self._check
            self._check = None
            try:
                ready = answer.result()
                self._failed = 0
            except DataError as error:
                fault = str(error)
            # a list that is being replaced, on a network disk
            except (OSError, ValueError) as error:
                ready = False
                self._failed = self._failed + 1
                if self._failed * POLL_INTERVAL > PATIENCE:
                    fault = f"group {group} of the text cannot be read: {error}"
        return ready, self._run.interrupts.status, fault


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """Run `work` in a daemon thread."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def _raise_fault(faults: list[str | None], rank: int) -> None:
    """Raise an error of any process on all of them."""
    for other, fault in enumerate(faults):
        if fault is not None:
            raise DataError(fault if other == rank else f"process {other} failed: {fault}")
