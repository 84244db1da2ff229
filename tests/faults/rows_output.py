"""Output that cannot be written, run folders that are removed during training, launchers that are killed."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.faults.fault import Fault, Result, call
from tests.training.conftest import ROOT, command, environment
from training.checkpoint.storage import steps_of
from training.errors import REQUEUE
from training.run.directory import held

LONG = ("training.tokens=4M", "training.validation.interval=null", "training.samples.prompts=[]")
UNSAVED = "training.checkpoint.interval=null"


def trains(redirect: str, folder: Path, words: list[str]) -> Result:
    """A whole training whose output goes where the shell's `redirect` says."""
    line = f'{{ "$@"; echo $? > status; }} {redirect}'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command(*words, "--run-dir=run")],
        cwd=folder,
        env=environment(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert steps_of(folder / "run")[-1] == 12
    return Result(int((folder / "status").read_text()), done.stdout.decode(), done.stderr.decode())


class Training:
    """A long training, from its first steps on."""

    def __init__(self, folder: Path, words: list[str], *prefix: str):
        self.run, log = folder / "run", folder / "log"
        line = [
            *(prefix or (sys.executable,)),
            str(ROOT / "train.py"),
            *words,
            *LONG,
            f"--run-dir={self.run}",
        ]
        with open(log, "wb") as stream:
            self.process = subprocess.Popen(line, cwd=folder, env=environment(), stdout=stream, stderr=stream)
        self.log = log
        self.wait_for(lambda: self.steps() >= 3 or self.process.poll() is not None)

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        return file.read_bytes().count(b'"kind": "train"') if file.exists() else 0

    def wait_for(self, condition) -> None:
        end = time.monotonic() + 120
        while not condition():
            if time.monotonic() > end:
                self.process.kill()
                raise TimeoutError(self.log.read_text())
            time.sleep(0.01)

    def result(self) -> Result:
        try:
            status = self.process.wait(60)
        finally:
            self.process.kill()
        return Result(status, "", self.log.read_text())


def hung_up(folder: Path, words: list[str]) -> Result:
    training = Training(folder, [*words, UNSAVED])
    training.process.send_signal(signal.SIGHUP)
    result = training.result()
    assert steps_of(training.run) == [training.steps()]
    return result


def loses(name: str, saves: bool, folder: Path, words: list[str]) -> Result:
    """`name` in the run folder is removed; where the folder is still there, what was trained is saved."""
    training = Training(folder, [*words, UNSAVED])
    gone = training.run / name
    os.rename(gone, folder / "gone")  # at once, also where the training is writing into it
    result = training.result()
    assert bool(steps_of(training.run)) == saves and training.run.exists() == saves
    return result


def without_manifest(folder: Path, words: list[str]) -> Result:
    (folder / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    result = call("train.py", *words, "--run-dir=run", cwd=folder)
    assert sorted(path.name for path in (folder / "run").iterdir()) == [".lock", "checkpoints"]
    return result


def second_trainer(folder: Path, words: list[str]) -> Result:
    """The lock file of a run that is being trained is deleted."""
    with held(folder / "run"):
        (folder / "run" / ".lock").unlink()
        return call("train.py", *words, "--run-dir=run", cwd=folder)


def orphaned(folder: Path, words: list[str]) -> Result:
    """torchrun is killed alone; its only worker saves and leaves."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    training = Training(folder, [*words, UNSAVED], *launcher)
    training.process.kill()
    result = training.result()
    training.wait_for(lambda: "saved" in training.log.read_text())
    assert steps_of(training.run) == [training.steps()]
    return Result(result.status, "", training.log.read_text())


FAULTS = [
    Fault("output to a closed pipe", partial(trains, "2>&1 | head -n 2"), status=0),
    Fault("standard error full", partial(trains, "2> /dev/full"), status=0),
    Fault("closed output", partial(trains, ">&- 2>&-"), status=0),
    Fault("closed terminal", hung_up, status=REQUEUE, names=("SIGHUP", "saved")),
    Fault("run folder removed", partial(loses, "", False), names=("/run was removed",)),
    Fault("metrics removed", partial(loses, "metrics.jsonl", True), names=("/run/metrics.jsonl",)),
    Fault("manifest removed", partial(loses, "manifest.json", True), names=("/run/manifest.json",)),
    Fault("no manifest", without_manifest, names=("run", "manifest.json", "--restart")),
    Fault("lock deleted", second_trainer, names=("another process",)),
    Fault("launcher killed", orphaned, status=-signal.SIGKILL, names=("SIGTERM", "saved")),
]
