"""Processes killed while they write checkpoints: forks of one process, which runs all cases.

python -m tests.training.checkpoint.deaths FOLDER   writes FOLDER/results.json
"""

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import torch

from errors import TrainingError
from run_directory import checkpoints as module
from run_directory.checkpoints import find_checkpoint, folder_of, remove_checkpoint, steps_of
from run_directory.optimizer_settings import AdamWSettings
from tests.training.net import Net
from tests.training.states import save_checkpoint
from training.optim.optimizer import make_optimizer, set_learning_rates


class RecordingConsole:
    """A console that stores its warnings."""

    def __init__(self):
        self.lines = []

    def warn(self, text):
        self.lines.append(text)


def trained(steps, seed=0, dtype=torch.float32, settings=None):
    """A net and its optimizer after some updates; the tokens come from the global generator."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    optimizer = make_optimizer(net, settings or AdamWSettings())
    for _ in range(steps):
        update(net, optimizer)
    return net, optimizer


def update(net, optimizer):
    """One update; its loss shows whether weights, moments and generator were all as before."""
    tokens = torch.randint(11, (3, 5))
    rate = 0.01 + 0.001 * torch.rand(()).item()
    set_learning_rates(optimizer, {"lr": rate, "adamw_lr": rate})
    loss = net(tokens).float().logsumexp(-1).mean() - net(tokens)[..., 0].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def forked(work):
    """The pid of a child that does `work` and leaves with the status it returns."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return child


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def writes_that_fail(folder):
    """The kernel refuses to let any file grow past a limit: each file in turn is the one that
    fails."""
    pair = trained(1)
    good = save_checkpoint(folder, 3, *pair)
    sizes = sorted(file.stat().st_size for file in good.folder.iterdir())

    def work(limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            save_checkpoint(folder, 5, *pair)
        except TrainingError as error:
            return 0 if "disk full" in str(error) and "step 3 is intact" in str(error) else 2
        return 3

    for limit in [size - 1 for size in sizes]:
        assert status_of(forked(lambda limit=limit: work(limit))) == 0, limit
        assert names(folder) == ["step-00000003"]
        assert find_checkpoint(folder).hash == good.hash


def killed_at_every_write(folder):
    """Before and after calls that touch the disk, from the first folder to the new name: step 3
    stays the newest until step 5 has its name, and is whole all the while."""
    pair = trained(1)
    good = save_checkpoint(folder, 3, *pair)
    places = [
        (module, "save_file"),
        (module, "write_json"),
        (module, "sync"),
        (module, "sha256_of"),
    ]
    places += [(os, "rename"), (os, "mkdir")]

    def work(when, after):
        calls = 0

        def deadly(real):
            def call(*args, **more):
                nonlocal calls
                calls += 1
                if calls == when and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                found = real(*args, **more)
                if calls == when:
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

            return call

        for home, name in places:
            setattr(home, name, deadly(getattr(home, name)))
        save_checkpoint(folder, 5, *pair)
        return 0

    when = 1
    struck = 0
    while (
        status := status_of(forked(lambda when=when: work(when, when % 2 == 0)))
    ) == -signal.SIGKILL:
        console = RecordingConsole()
        found = find_checkpoint(folder, console)
        assert console.lines == [] and found.step in (3, 5)
        assert found.step == 5 or (found.hash == good.hash and steps_of(folder) == [3])
        struck += found.step == 3
        for step in steps_of(folder)[1:]:
            remove_checkpoint(folder_of(folder, step))
        when += 1
    assert status == 0 and when > 12 and struck > 8, (status, when, struck)
    assert names(folder) == ["step-00000003", "step-00000005"]


CASES = (writes_that_fail, killed_at_every_write)


def main() -> None:
    """Run every case in a folder of its own; FOLDER/results.json holds the traceback of each, or
    ''."""
    results = {}
    for case in CASES:
        folder = Path(sys.argv[1]) / case.__name__
        folder.mkdir()
        try:
            case(folder)
        except BaseException:
            results[case.__name__] = traceback.format_exc()
        else:
            results[case.__name__] = ""
    (Path(sys.argv[1]) / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
