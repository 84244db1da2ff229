"""Text that is still being prepared: all processes wait for it together, and hear signals meanwhile.

Which steps draw on a further group of text depends on the groups before it alone, so every process comes to
the same waits by itself; at other steps no word is exchanged.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TypeVar

from data import Batch, Batches, DataError
from training.console import Console
from training.errors import TrainingError
from training.exits import INTERRUPTED, REQUEUE
from training.interrupts import Interrupts
from training.parallel import Parallel
from training.record import Recorder
from training.watch import Watch

LOOK_EVERY = 0.2  # seconds
PATIENCE = 60.0  # seconds in which all must see what one sees, and a disk that others write to be readable
T = TypeVar("T")


class Supply:
    """The text of a run's steps, once it is there.

    used: hashes of the groups that the steps before the first were drawn from.
    status: exit status that a signal to any process asked for before they waited or while they did; 0 where
        none came.
    """

    def __init__(
        self,
        batches: Batches,
        used: list[str],
        parallel: Parallel,
        interrupts: Interrupts,
        watch: Watch,
        recorder: Recorder,
        console: Console,
    ):
        self.status = 0
        self._batches, self._used, self._parallel = batches, used, parallel
        self._interrupts, self._watch, self._recorder = interrupts, watch, recorder
        self._console = console
        self._line = 0  # the last that all processes see
        self._answer: Future[bool] | None = None  # of a look that has begun
        self._failed = 0  # looks in a row that the disk failed

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, Batch]]:
        """(step, this process's batch) for each step, the next one read while the present one is trained on;
        ends early with a `status`. Raises DataError or TrainingError, on all processes, where text will not
        come or is not what was `used`."""
        with ThreadPoolExecutor(1) as reader:
            coming = None
            for step in range(start, stop):
                if not self._wait(step):
                    return
                batch = (coming or reader.submit(self._fetch, step)).result()
                ahead = step + 1 < stop and self._batches.lies_in(step + 1, self._line)
                coming = reader.submit(self._fetch, step + 1) if ahead else None
                yield step, batch

    def _fetch(self, step: int) -> Batch:
        return self._batches.batch(step, self._parallel.rank, self._parallel.world)

    def _wait(self, step: int) -> bool:
        """Whether a step's text is there on all processes; not where `status` has been asked for."""
        while not self._batches.lies_in(step, self._line):
            self.status = self._recorder.read()  # it may be long until steps are read again
            if self.status or not self._wait_for(self._line + 1):
                return False
            self._line += 1
            self._recorder.resume_clock()
        self._batches.check_groups(self._used)
        self._used = []
        return True

    def _wait_for(self, line: int) -> bool:
        looks = seen = 0
        while True:
            mine = self._look(line)
            with self._watch.together("a look for further text"):
                found = self._parallel.gather(mine)
            _refuse([fault for *_, fault in found], self._parallel.rank)
            asked = {status for _, status, _ in found} - {0}
            if asked:
                self.status = REQUEUE if REQUEUE in asked else INTERRUPTED
                return False
            missing = [rank for rank, (ready, *_) in enumerate(found) if not ready]
            if not missing:
                return True
            blind = [rank for rank in missing if found[rank][0] is False]
            seen += bool(blind) and len(missing) < len(found)
            if seen * LOOK_EVERY > PATIENCE and blind:
                raise TrainingError(
                    f"group {line} of the text is prepared, and process {blind[0]} does not see it: "
                    "data.root must lie on a disk that all of them see"
                )
            if not looks:
                self._console.say(f"waiting for group {line} of the text to be prepared")
            looks += 1
            time.sleep(LOOK_EVERY)

    def _look(self, line: int) -> tuple[bool | None, int, str | None]:
        """Whether a line is there, None while that is being found out; the status asked for here; and why
        the line will never come or is no use.

        A look may take long, as files are compared with their hashes: it goes on while others are told so.
        """
        if self._answer is None:
            self._answer = beside(partial(self._batches.has_line, line, verify=self._parallel.main))
        wait_for([self._answer], LOOK_EVERY)
        ready, fault = None, None
        if self._answer.done():
            answer, self._answer = self._answer, None
            try:
                ready, self._failed = answer.result(), 0
            except DataError as error:
                fault = str(error)
            except (OSError, ValueError) as error:  # a list that is replaced meanwhile, on a network's disk
                ready, self._failed = False, self._failed + 1
                if self._failed * LOOK_EVERY > PATIENCE:
                    fault = f"group {line} of the text cannot be looked for: {error}"
        return ready, self._interrupts.status, fault


def beside(work: Callable[[], T]) -> "Future[T]":
    """What `work` gives, from a thread that nobody waits for when the process ends."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def _refuse(faults: list[str | None], rank: int) -> None:
    """Raise what went wrong on any process, on each of them."""
    for other, fault in enumerate(faults):
        if fault is not None:
            raise DataError(fault if other == rank else f"process {other} could not go on: {fault}")
