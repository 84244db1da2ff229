"""Output that cannot be written, run directories removed during training, killed launchers."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from errors import REQUEUE
from run_directory.checkpoints import steps_of
from tests.faults.fault import Fault, Result, call
from tests.files import ROOT
from tests.processes import ScriptProcess, wait_until
from tests.training.conftest import environment
from tests.training.tiny import logged_steps

LONG = ("training.tokens=4M", "training.validation.interval=null", "training.samples.prompts=[]")
UNSAVED = "training.checkpoint.interval=null"


def trains_into_a_closed_pipe(folder: Path, overrides: list[str]) -> Result:
    """A whole training whose output is read up to its second line."""
    os.mkfifo(pipe := folder / "pipe")
    process = ScriptProcess("train.py", [*overrides, "--run-dir=run"], folder, pipe, pipe)
    with open(pipe, encoding="utf-8") as reader:
        assert reader.readline()
        assert reader.readline()
    return ended(process, folder)


def trains(out: str | None, err: str | None, folder: Path, overrides: list[str]) -> Result:
    """A whole training with these output streams."""
    return ended(ScriptProcess("train.py", [*overrides, "--run-dir=run"], folder, out, err), folder)


def ended(process: ScriptProcess, folder: Path) -> Result:
    """The result of a whole training."""
    try:
        status = process.wait(120)
    finally:
        process.kill()
    assert steps_of(folder / "run")[-1] == 12
    return Result(status, "", "")


class Training:
    """A long training, from its first steps on."""

    def __init__(self, folder: Path, overrides: list[str], *launcher: str):
        self.run = folder / "run"
        self.log = folder / "log"
        overrides = [*overrides, *LONG, f"--run-dir={self.run}"]
        if launcher:
            with open(self.log, "wb") as stream:
                line = [*launcher, str(ROOT / "train.py"), *overrides]
                self.process = subprocess.Popen(
                    line, cwd=folder, env=environment(), stdout=stream, stderr=stream
                )
        else:
            self.process = ScriptProcess("train.py", overrides, folder, self.log, self.log)
        wait_until(lambda: self.steps() >= 3 or self.process.poll() is not None)

    def steps(self) -> int:
        return logged_steps(self.run)

    def result(self) -> Result:
        try:
            status = self.process.wait(60)
        finally:
            self.process.kill()
        return Result(status, "", self.log.read_text())


def hung_up(folder: Path, overrides: list[str]) -> Result:
    training = Training(folder, [*overrides, UNSAVED])
    training.process.send_signal(signal.SIGHUP)
    result = training.result()
    assert steps_of(training.run) == [training.steps()]
    return result


def loses(name: str, folder: Path, overrides: list[str]) -> Result:
    """`name` in the run directory is removed, which the next checkpoint reports."""
    training = Training(folder, [*overrides, "training.checkpoint.interval=200"])
    gone = training.run / name
    os.rename(gone, folder / "gone")  # at once, also where the training is writing into it
    result = training.result()
    assert training.run.exists() == bool(name)
    return result


def shards_overwritten(folder: Path, overrides: list[str]) -> Result:
    """In place, as the running training has them mapped; noticed when its next epoch begins."""
    training = Training(folder, [*overrides, UNSAVED, f"data.root={folder}"])
    for shard in folder.glob("*/train/*.tokens"):
        size = shard.stat().st_size
        with open(shard, "r+b") as file:
            file.write(bytes(size))
    return training.result()


def without_manifest(folder: Path, overrides: list[str]) -> Result:
    (folder / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    result = call("train.py", *overrides, "--run-dir=run", cwd=folder)
    assert sorted(path.name for path in (folder / "run").iterdir()) == [
        ".holder",
        ".lock",
        "checkpoints",
    ]
    return result


def orphaned(folder: Path, overrides: list[str]) -> Result:
    """torchrun is killed alone; its only worker saves and leaves."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    training = Training(folder, [*overrides, UNSAVED], *launcher)
    training.process.kill()
    result = training.result()
    wait_until(lambda: "saved" in training.log.read_text())
    assert steps_of(training.run) == [training.steps()]
    return Result(result.status, "", training.log.read_text())


FAULTS = [
    Fault("output to a closed pipe", trains_into_a_closed_pipe, status=0),
    Fault("standard error full", partial(trains, os.devnull, "/dev/full"), status=0),
    Fault("closed output", partial(trains, None, None), status=0),
    Fault("closed terminal", hung_up, status=REQUEUE, names=("SIGHUP", "saved")),
    Fault("run directory removed", partial(loses, ""), names=("/run was removed",)),
    Fault("metrics removed", partial(loses, "metrics.jsonl"), names=("/run/metrics.jsonl",)),
    Fault("manifest removed", partial(loses, "manifest.json"), names=("/run/manifest.json",)),
    Fault("shards overwritten", shards_overwritten, names=(".tokens", "hash", "prepare the data")),
    Fault("no manifest", without_manifest, names=("run", "manifest.json", "--restart")),
    Fault(
        "launcher killed",
        orphaned,
        status=-signal.SIGKILL,
        names=("SIGTERM", "saved"),
        is_slow=True,
    ),
]
