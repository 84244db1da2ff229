"""Two-process runs with injected faults: forks of one process that has done the imports, connected
by gloo.

python -m tests.training.ranks FOLDER OVERRIDE...   writes FOLDER/results.json
"""

import hashlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

import training.setup
from data import DataError
from data.preparation import preparation
from data.sampling.batches import BatchSampler
from model import ContextShard
from tests.files import ROOT
from tests.processes import free_port, wait_until
from tests.training.tiny import logged_steps
from training import parallel
from training.metrics import Metrics

TIMEOUT = 3.0  # of a collective in a step
HOST_TIMEOUT = 8.0  # of a wait for the work of one process
BUSY = 30.0  # what a busy machine may take to leave; what does not leave takes a minute or more
ENDLESS = [
    "training.tokens=1000000000",
    "training.checkpoint.interval=1",
    "training.validation.interval=null",
]
Before = Callable[[Path, int], None]  # what a rank does before it starts: its folder, its number


class Pair:
    """Two ranks of one run in forks, the output of each in `<folder>.<rank>.log`."""

    def __init__(self, folder: Path, words: list[str], before: Before | None = None):
        self.folder = folder
        self.statuses: list[int | None] = [None, None]
        port = free_port()
        command = ["train.py", *words, "--run-dir", str(folder)]
        self.children = [self._start(command, rank, port, before) for rank in (0, 1)]

    def _start(self, command: list[str], rank: int, port: int, before: Before | None) -> int:
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            log = os.open(f"{self.folder}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            launch |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "ACCELERATE_USE_CPU": "true",
            }
            os.environ.update({name: str(value) for name, value in launch.items()})
            parallel.STEP_TIMEOUT = timedelta(seconds=TIMEOUT)
            parallel.HOST_TIMEOUT = timedelta(seconds=HOST_TIMEOUT)
            if before is not None:
                before(self.folder, rank)
            sys.argv = command
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def has_ended(self, *ranks: int) -> bool:
        for rank in ranks or (0, 1):
            if self.statuses[rank] is None:
                pid, status = os.waitpid(self.children[rank], os.WNOHANG)
                self.statuses[rank] = os.waitstatus_to_exitcode(status) if pid else None
        return all(self.statuses[rank] is not None for rank in ranks or (0, 1))

    def wait(self, *ranks: int) -> float:
        return wait_until(lambda: self.has_ended(*ranks))

    def train(self) -> None:
        """Wait for three steps."""
        wait_until(lambda: logged_steps(self.folder) >= 3 or self.has_ended(0))

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            if self.statuses[rank] is None:
                os.kill(self.children[rank], number)

    def summary(self, **more: object) -> dict:
        """What the pair left, after all have ended."""
        self.wait()
        logs = [Path(f"{self.folder}.{rank}.log").read_text(encoding="utf-8") for rank in (0, 1)]
        return {"statuses": self.statuses, "logs": logs, "steps": logged_steps(self.folder)} | more

    def seconds_since_hit(self) -> float:
        """How long rank 0 takes to leave after rank 1 was hit; rank 1 is killed then."""
        self.wait(0)
        took = time.time() - float(Path(f"{self.folder}.hit").read_text(encoding="ascii"))
        self.send(signal.SIGKILL, 1)
        return took


def hit_itself(folder: Path, number: int) -> None:
    Path(f"{folder}.hit").write_text(str(time.time()), encoding="ascii")
    os.kill(os.getpid(), number)


def poisoned(folder: Path, words: list[str]) -> dict:
    """At step 3 one gradient of rank 1 is NaN, at step 5 its loss is infinite; weights are recorded
    as a digest after every step."""

    def before(folder: Path, rank: int) -> None:
        wrap = parallel.Parallel.wrap
        log = Metrics.log
        passes = [0]

        def wrapped(self, model, **more):
            weight = next(model.parameters())
            whole = wrap(self, model, **more)

            def spoil(module, places, output):
                if not torch.is_grad_enabled():
                    return None
                passes[0] += 1
                if rank == 1 and passes[0] == 3:
                    hook = weight.register_hook(lambda grad: hook.remove() or grad * float("nan"))
                return output * float("inf") if rank == 1 and passes[0] == 5 else None

            whole.register_forward_hook(spoil)
            return whole

        def logged(self, state, *arguments, **options):
            status = log(self, state, *arguments, **options)
            content = b"".join(p.detach().numpy().tobytes() for p in state.model.parameters())
            with open(f"{folder}.{rank}.weights", "a", encoding="ascii") as file:
                file.write(hashlib.sha256(content).hexdigest() + "\n")
            return status

        parallel.Parallel.wrap = wrapped
        Metrics.log = logged

    pair = Pair(folder, [*words, "training.on_nonfinite={name: skip, limit: 2}"], before)
    pair.wait()
    files = [Path(f"{folder}.{rank}.weights") for rank in (0, 1)]
    return pair.summary(weights=[file.read_text(encoding="ascii").split() for file in files])


def signalled(folder: Path, words: list[str]) -> dict:
    """SIGUSR1 and then SIGTERM, to rank 1 alone; no checkpoint but that of the signal."""
    pair = Pair(folder, [*words, *ENDLESS, "training.checkpoint.interval=null"])
    pair.train()
    pair.send(signal.SIGUSR1, 1)
    pair.send(signal.SIGTERM, 1)
    return pair.summary()


def failing_in_loop(folder: Path, words: list[str]) -> dict:
    """The text of rank 1 cannot be read in its third step."""

    def before(folder: Path, rank: int) -> None:
        read = BatchSampler.batch

        def broken(self, step, *places):
            if step == 2 and rank == 1:
                raise DataError("shard 7 cannot be read")
            return read(self, step, *places)

        BatchSampler.batch = broken

    pair = Pair(folder, [*words, *ENDLESS], before)
    return pair.summary(seconds=pair.wait())


def unprepared(folder: Path, words: list[str]) -> dict:
    """Two ranks of a run whose text is not prepared."""
    root = folder.with_name("unprepared-data")
    pair = Pair(folder, [*words, f"data.root={root}"])
    pair.wait()
    return pair.summary(left=root.exists() or folder.exists())


def lost_in_gather(folder: Path, words: list[str], number: int) -> dict:
    """A signal no process can catch hits rank 1 as it enters a gather of keys after three steps; how
    long rank 0 takes to leave."""

    def before(folder: Path, rank: int) -> None:
        gather = ContextShard.gather

        def hit(self, x):
            if rank == 1 and logged_steps(folder) >= 3:
                hit_itself(folder, number)
            return gather(self, x)

        ContextShard.gather = hit

    pair = Pair(folder, [*words, *ENDLESS, "training.parallel.context=2"], before)
    return pair.summary(seconds=pair.seconds_since_hit())


def lost_early(folder: Path, words: list[str], number: int) -> dict:
    """The main rank takes longer to prepare than is waited for in a step; then rank 1 is hit when
    it makes its model."""

    def before(folder: Path, rank: int) -> None:
        prepare = preparation.prepare

        def slow(*places):
            time.sleep(1.5 * TIMEOUT)
            return prepare(*places)

        if rank == 0:
            preparation.prepare = slow
        else:
            training.setup.make_model = lambda *_: hit_itself(folder, number)

    pair = Pair(folder, words, before)
    return pair.summary(seconds=pair.seconds_since_hit())


SCENARIOS = {
    "poisoned": poisoned,
    "signalled": signalled,
    "failing in the loop": failing_in_loop,
    "unprepared": unprepared,
    "stopped in a gather": partial(lost_in_gather, number=signal.SIGSTOP),
    "killed early": partial(lost_early, number=signal.SIGKILL),
}


def main() -> None:
    """All scenarios, in FOLDER/results.json."""
    root, *words = sys.argv[1:]
    results = {}
    for name, work in SCENARIOS.items():
        results[name] = work(Path(root) / name.replace(" ", "-"), words)
    (Path(root) / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
