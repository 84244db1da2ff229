"""Processes killed while they write checkpoints: forks of one process, which runs all cases.

python -m tests.training.deaths FOLDER   writes FOLDER/results.json
"""

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

from errors import TrainingError
from run_directory import checkpoints as module
from run_directory.checkpoints import find_checkpoint, folder_of, remove_checkpoint, steps_of
from tests.training.net import save, trained


def status_of(work) -> int:
    """The exit status of a child that does `work` and leaves with the status it returns."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def writes_that_fail(folder):
    """The kernel refuses to let any file grow past a limit: each file in turn is the one that
    fails."""
    state = trained(1)
    good = save(folder, 3, state)
    sizes = sorted(file.stat().st_size for file in good.folder.iterdir())

    def work(limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            save(folder, 5, state)
        except TrainingError as error:
            return 0 if "disk full" in str(error) and "step 3 is intact" in str(error) else 2
        return 3

    for limit in [size - 1 for size in sizes]:
        assert status_of(lambda limit=limit: work(limit)) == 0, limit
        assert names(folder) == ["step-00000003"]
        assert find_checkpoint(folder).hash == good.hash


def killed_at_every_write(folder):
    """Before and after calls that touch the disk, from the first folder to the new name: step 3
    stays the newest until step 5 has its name, and is whole all the while."""
    state = trained(1)
    good = save(folder, 3, state)
    places = [(module, name) for name in ("write_tensors", "write_json", "sync", "sha256_of")]
    places += [(os, "rename"), (os, "mkdir")]

    def work(when):
        is_after = when % 2 == 0
        calls = 0

        def deadly(real):
            def call(*args, **more):
                nonlocal calls
                calls += 1
                is_last = calls == when  # a call may make others
                if is_last and not is_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*args, **more)
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return call

        for home, name in places:
            setattr(home, name, deadly(getattr(home, name)))
        save(folder, 5, state)
        return 0

    when = 1
    struck = 0
    while (status := status_of(lambda when=when: work(when))) == -signal.SIGKILL:
        newest = find_checkpoint(folder)
        assert newest.step in (3, 5)
        assert newest.step == 5 or (newest.hash == good.hash and steps_of(folder) == [3])
        struck += newest.step == 3
        for step in steps_of(folder)[1:]:
            remove_checkpoint(folder_of(folder, step))
        when += 1
    assert status == 0, (status, when, struck)
    assert when > 12, (status, when, struck)
    assert struck > 8, (status, when, struck)
    assert names(folder) == ["step-00000003", "step-00000005"]


def main() -> None:
    """Run every case in a folder of its own; FOLDER/results.json holds the traceback of each, or
    ''."""
    results = {}
    for case in (writes_that_fail, killed_at_every_write):
        folder = Path(sys.argv[1]) / case.__name__
        folder.mkdir()
        results[case.__name__] = ""
        try:
            case(folder)
        except BaseException:
            results[case.__name__] = traceback.format_exc()
    (Path(sys.argv[1]) / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
