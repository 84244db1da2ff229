"""Text that is still being prepared: all processes wait for it together, and hear signals meanwhile.

Which steps draw on a further group of text depends on the groups before it alone, so every process comes to
the same waits by itself; at other steps no word is exchanged.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from data import Batch, Batches, DataError
from training.console import Console
from training.errors import TrainingError
from training.exits import INTERRUPTED, REQUEUE
from training.interrupts import Interrupts
from training.parallel import Parallel
from training.watch import Watch

LOOK_EVERY = 0.2  # seconds
PATIENCE = 60.0  # seconds after which what one process sees must be seen by all


class Supply:
    """The text of a run's steps, once it is there.

    used: hashes of the groups that the steps before the first were drawn from.
    status: exit status that a signal to any process asked for while they waited; 0 where none came.
    """

    def __init__(
        self,
        batches: Batches,
        used: list[str],
        parallel: Parallel,
        interrupts: Interrupts,
        watch: Watch,
        console: Console,
    ):
        self.status = 0
        self._batches, self._used, self._parallel = batches, used, parallel
        self._interrupts, self._watch, self._console = interrupts, watch, console
        self._line = 0  # the last that all processes see

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
            if not self._wait_for(self._line + 1):
                return False
            self._line += 1
        self._batches.check_groups(self._used)
        self._used = []
        return True

    def _wait_for(self, line: int) -> bool:
        looks = seen = 0
        while True:
            with self._watch.together("a look for further text"):
                found = self._parallel.gather(self._look(line))
            _refuse([fault for *_, fault in found], self._parallel.rank)
            asked = {status for _, status, _ in found} - {0}
            if asked:
                self.status = REQUEUE if REQUEUE in asked else INTERRUPTED
                return False
            missing = [rank for rank, (ready, *_) in enumerate(found) if not ready]
            if not missing:
                return True
            seen += len(missing) < len(found)
            if seen * LOOK_EVERY > PATIENCE:
                raise TrainingError(
                    f"group {line} of the text is prepared, and process {missing[0]} does not see it: "
                    "data.root must lie on a disk that all of them see"
                )
            if not looks:
                self._console.say(f"waiting for group {line} of the text to be prepared")
            looks += 1
            time.sleep(LOOK_EVERY)

    def _look(self, line: int) -> tuple[bool, int, str | None]:
        """Whether a line is there, the status asked for here, and why it will never come or is no use."""
        try:
            ready = self._batches.has_line(line, verify=self._parallel.main)
            return ready, self._interrupts.status, None
        except (DataError, OSError) as error:
            return False, self._interrupts.status, str(error)


def _refuse(faults: list[str | None], rank: int) -> None:
    """Raise what went wrong on any process, on each of them."""
    for other, fault in enumerate(faults):
        if fault is not None:
            raise DataError(fault if other == rank else f"process {other} could not go on: {fault}")
