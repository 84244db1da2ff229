"""Two-process runs with injected faults: forks of one process that has done the imports, connected
by gloo.

python -m tests.training.distributed.ranks quick|slow FOLDER OVERRIDE...   writes
FOLDER/results.json
"""

import hashlib
import json
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

import train
import training.setup
from data import DataError
from data.sampling.batches import BatchSampler
from errors import TrainingError
from model import ContextShard
from tests.processes import free_port
from training.distributed import parallel
from training.distributed.parallel import Parallel
from training.hardware import peak_flops
from training.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 3.0  # of a collective in a step
HOST_TIMEOUT = 8.0  # of a wait for the work of one process
BUSY = 30.0  # what a busy machine may take to leave; what does not leave takes a minute or more
ENDLESS = [
    "training.tokens=1000000000",
    "training.checkpoint.interval=1",
    "training.validation.interval=null",
]


def start(
    folder: Path,
    overrides: list[str],
    rank: int,
    port: int,
    before=None,
    world: int = 2,
    run: Path | None = None,
) -> int:
    """One rank in a fork, its output in `<folder>.<rank>.log`; the fork's number.

    Args:
        run: the run directory; None: `folder`.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(f"{folder}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
        parallel.STEP_TIMEOUT = timedelta(seconds=TIMEOUT)
        parallel.HOST_TIMEOUT = timedelta(seconds=HOST_TIMEOUT)
        if before is not None:
            before(folder, rank)
        sys.argv = [
            "train.py",
            *overrides,
            "--run-dir",
            str(run or folder),
        ]
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def steps_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b'"kind": "train"') if file.exists() else 0


def wait_for(condition, seconds: float = 120.0) -> float:
    """Seconds until the condition holds; raises after too many."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError
        time.sleep(0.01)
    return time.monotonic() - begun


def ended(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


class Pair:
    """Two ranks of one run, or as many as `world` says."""

    def __init__(
        self,
        folder: Path,
        overrides: list[str],
        before=None,
        world: int = 2,
        run: Path | None = None,
    ):
        self.folder = folder
        port = free_port()
        self.ranks = range(world)
        self.children = [
            start(folder, overrides, rank, port, before, world, run) for rank in self.ranks
        ]
        self.statuses: list[int | None] = [None] * world

    def poll(self, *ranks: int) -> bool:
        for rank in ranks or self.ranks:
            if self.statuses[rank] is None:
                self.statuses[rank] = ended(self.children[rank])
        return all(self.statuses[rank] is not None for rank in ranks or self.ranks)

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or self.ranks:
            with suppress(ProcessLookupError):
                os.kill(self.children[rank], number)

    def log(self, rank: int) -> str:
        file = Path(f"{self.folder}.{rank}.log")
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def summary(self) -> dict:
        logs = [self.log(rank) for rank in self.ranks]
        return {"statuses": self.statuses, "logs": logs, "steps": steps_of(self.folder)}


def poison(folder: Path, rank: int) -> None:
    """At step 3 one gradient of rank 1 is NaN, at step 5 its loss is infinite; weights leave as a
    digest."""
    wrap = Parallel.wrap
    log = Metrics.log
    passes = [0]
    models = []

    def wrapped(self, model, **more):
        weight = next(model.parameters())
        whole = wrap(self, model, **more)
        models.append(model)

        def spoil(module, places, output):
            if not torch.is_grad_enabled():
                return None
            passes[0] += 1
            if rank == 1 and passes[0] == 3:
                handle = weight.register_hook(lambda grad: handle.remove() or grad * float("nan"))
            return output * float("inf") if rank == 1 and passes[0] == 5 else None

        whole.register_forward_hook(spoil)
        return whole

    def logged(self, *arguments, **options):
        status = log(self, *arguments, **options)
        weights = models[0].parameters()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in weights)).hexdigest()
        with open(f"{folder}.{rank}.weights", "a", encoding="ascii") as file:
            file.write(digest + "\n")
        return status

    Parallel.wrap = wrapped
    Metrics.log = logged


def lost(folder: Path, overrides: list[str], number: signal.Signals) -> dict:
    """A signal no process can catch hits rank 1; how long rank 0 takes to leave."""
    pair = Pair(folder, [*overrides, *ENDLESS])
    wait_for(lambda: steps_of(folder) >= 3 or pair.poll(0))
    pair.send(number, 1)
    took = wait_for(lambda: pair.poll(0))
    pair.send(signal.SIGKILL, 1)
    wait_for(lambda: pair.poll(1))
    return pair.summary() | {"seconds": took}


def lost_in_gather(folder: Path, overrides: list[str], number: signal.Signals) -> dict:
    """A signal no process can catch hits rank 1 when it enters a gather of keys after three steps;
    how long rank 0 takes to leave."""

    def before(folder: Path, rank: int) -> None:
        gather = ContextShard.gather

        def hit(self, x):
            if steps_of(folder) >= 3:
                Path(f"{folder}.hit").write_text(str(time.time()), encoding="ascii")
                os.kill(os.getpid(), number)
            return gather(self, x)

        if rank == 1:
            ContextShard.gather = hit

    pair = Pair(folder, [*overrides, *ENDLESS, "training.parallel.context=2"], before)
    wait_for(lambda: pair.poll(0))
    took = time.time() - float(Path(f"{folder}.hit").read_text(encoding="ascii"))
    pair.send(signal.SIGKILL, 1)
    wait_for(lambda: pair.poll(1))
    return pair.summary() | {"seconds": took}


def signalled(folder: Path, overrides: list[str]) -> dict:
    """SIGUSR1 and then SIGTERM, to rank 1 alone; no checkpoint but that of the signal."""
    pair = Pair(folder, [*overrides, *ENDLESS, "training.checkpoint.interval=null"])
    wait_for(lambda: steps_of(folder) >= 3 or pair.poll(0))
    pair.send(signal.SIGUSR1, 1)
    pair.send(signal.SIGTERM, 1)
    wait_for(pair.poll)
    return pair.summary()


def failing(folder: Path, overrides: list[str]) -> dict:
    """A run that was signalled goes on, and its metrics cannot be read, which the main rank alone
    does."""
    shutil.copytree(folder.with_name("signalled"), folder)
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b"torn\n")
    pair = Pair(folder, [*overrides, *ENDLESS, "training.checkpoint.interval=null"])
    wait_for(pair.poll)
    return pair.summary()


def slow_then_lost(number: signal.Signals):
    """The main rank takes longer to prepare than is waited for in a step; then rank 1 is hit by
    `number` when it makes its model."""

    def before(folder: Path, rank: int) -> None:
        prepare = training.setup.prepare
        make_model = training.setup.make_model

        def slow(*places):
            time.sleep(1.5 * TIMEOUT)
            return prepare(*places)

        def hit(*places, **more):
            if os.environ.get("PREPARED"):
                Path(f"{folder}.hit").write_text(str(time.time()), encoding="ascii")
                os.kill(os.getpid(), number)
            return make_model(*places, **more)

        def check_model(settings):
            checked(settings)
            os.environ["PREPARED"] = "1"  # models before this are for their limits alone

        checked = training.setup.check_model
        if rank == 0:
            training.setup.prepare = slow
        else:
            training.setup.check_model = check_model
            training.setup.make_model = hit

    return before


def lost_early(folder: Path, overrides: list[str], number: signal.Signals) -> dict:
    """Rank 1 is lost before the first step; how long rank 0 takes to leave."""
    pair = Pair(folder, overrides, slow_then_lost(number))
    wait_for(lambda: pair.poll(0))
    took = time.time() - float(Path(f"{folder}.hit").read_text(encoding="ascii"))
    pair.send(signal.SIGKILL, 1)
    wait_for(pair.poll)
    return pair.summary() | {"seconds": took}


def hold_up(folder: Path, rank: int) -> None:
    """The main rank prepares for a minute, and says so."""

    def slow(*places):
        Path(f"{folder}.preparing").touch()
        time.sleep(60)

    if rank == 0:
        training.setup.prepare = slow


def signalled_early(folder: Path, overrides: list[str], number: signal.Signals) -> dict:
    """A signal to both ranks, of which one prepares and the other waits for it in a library."""
    pair = Pair(folder, overrides, hold_up)
    wait_for(Path(f"{folder}.preparing").exists)
    time.sleep(0.3)  # the other has come to its wait
    pair.send(number, 1)
    took = wait_for(lambda: pair.poll(1))
    pair.send(number, 0)
    took += wait_for(lambda: pair.poll(0))
    return pair.summary() | {"seconds": took, "left": folder.exists()}


def fail_last(folder: Path, rank: int) -> None:
    """The main rank fails after its last step, while the other waits to leave the process group
    with it."""

    def end(self):
        raise TrainingError("failed last")

    if rank == 0:
        Metrics.end = end


def failing_last(folder: Path, overrides: list[str]) -> dict:
    pair = Pair(folder, overrides, fail_last)
    wait_for(pair.poll)
    return pair.summary()


def fail_in_loop(failing: int):
    """The text of one rank cannot be read in its third step."""

    def before(folder: Path, rank: int) -> None:
        read = BatchSampler.batch

        def broken(self, step, *places):
            if step == 2:
                raise DataError("shard 7 cannot be read")
            return read(self, step, *places)

        if rank == failing:
            BatchSampler.batch = broken

    return before


def failing_in_loop(folder: Path, overrides: list[str], rank: int) -> dict:
    pair = Pair(folder, [*overrides, *ENDLESS], fail_in_loop(rank))
    took = wait_for(pair.poll)
    return pair.summary() | {"seconds": took}


def unprepared(folder: Path, overrides: list[str]) -> dict:
    """Two ranks of a run whose text is not prepared."""
    root = folder.with_name("unprepared-data")
    pair = Pair(folder, [*overrides, f"data.root={root}"])
    wait_for(pair.poll)
    return pair.summary() | {"left": root.exists() or folder.exists()}


def contended(folder: Path, overrides: list[str]) -> dict:
    """Two ranks start in a run directory in which two others train, one of which is stopped."""
    holders = Pair(folder, [*overrides, *ENDLESS])
    wait_for(lambda: steps_of(folder) >= 3 or holders.poll(0))
    holders.send(signal.SIGSTOP, 1)
    pair = Pair(folder.with_name("second"), [*overrides, *ENDLESS], run=folder)
    wait_for(pair.poll)
    holders.send(signal.SIGKILL)
    wait_for(holders.poll)
    return pair.summary() | {"holder": holders.children[0]}


def poisoned(folder: Path, overrides: list[str]) -> dict:
    pair = Pair(folder, [*overrides, "training.on_nonfinite={name: skip, limit: 2}"], poison)
    wait_for(pair.poll)
    weights = [
        Path(f"{folder}.{rank}.weights").read_text(encoding="ascii").split() for rank in (0, 1)
    ]
    return pair.summary() | {"weights": weights}


# Scenarios by name, those of the quick suite first: each kind of loss, and each phase of a run.
QUICK = {
    "poisoned": poisoned,
    "signalled": signalled,
    "failing": failing,
    "failing last": failing_last,
    "failing in the loop 0": partial(failing_in_loop, rank=0),
    "failing in the loop 1": partial(failing_in_loop, rank=1),
    "unprepared": unprepared,
    "contended": contended,
    "stopped": partial(lost, number=signal.SIGSTOP),
    "stopped in a gather": partial(lost_in_gather, number=signal.SIGSTOP),
    "killed early": partial(lost_early, number=signal.SIGKILL),
    "interrupted early": partial(signalled_early, number=signal.SIGINT),
}
SLOW = {
    "killed": partial(lost, number=signal.SIGKILL),
    "killed in a gather": partial(lost_in_gather, number=signal.SIGKILL),
    "stopped early": partial(lost_early, number=signal.SIGSTOP),
    "signalled early": partial(signalled_early, number=signal.SIGTERM),
}


def main() -> None:
    """The scenarios `quick` or `slow`, in FOLDER/results.json."""
    assert torch.get_num_threads() and train.main  # imported here, so that no fork has to
    peak_flops(torch.device("cpu"))  # measured once, for all forks
    which = sys.argv[1]
    folder = Path(sys.argv[2])
    overrides = sys.argv[3:]
    scenarios = QUICK if which == "quick" else SLOW
    results = {
        name: work(folder / name.replace(" ", "-"), overrides) for name, work in scenarios.items()
    }
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
