"""Text that is prepared while training goes on: in groups, each a prepared folder of its own.

The first group decides tokenizer and held-out text; the others are prepared behind it by a process of their
own, with that tokenizer and without copies of that held-out text. Training sees group after group, each in an
order of its own, and then all again: a function of settings and text alone, however far preparation was when
a step was asked for. A list of the groups, written when one is sealed, tells readers how far it is.

  python -m data.groups FOLDER < settings.json      what `Groups.preparing` starts; ends when its input closes
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from data.child import lines_of_starter
from data.console import Silent
from data.errors import DataError
from data.files import read_json, write_json
from data.locks import locked
from data.pool import HOUSE
from data.preparation import Prepared, beside, open_prepared, prepare_one
from data.settings import DataSettings
from data.sources import open_source
from data.store import Store, mend

LOOK_EVERY = 0.2  # seconds
PATIENCE = 60  # seconds in which a process that prepares must have begun


class Groups:
    """The groups of data.source, the first of which is prepared."""

    def __init__(self, settings: DataSettings, first: Prepared):
        self.settings, self.first = settings, first
        self.list = first.folder / f"groups-{settings.max_bytes or 'all'}.json"
        self._process: subprocess.Popen | None = None
        self._opened: dict[int, Store] = {0: first.train}
        self._found: dict[int, int] = {}  # lines that are there, which the list is not asked for again
        self._verified = {0}  # whoever opened the first did that

    def store(self, line: int) -> Store:
        """The text of a line of training: group `line`, or, past the last, all again; waits for it.

        Raises DataError where the group is not there and nobody prepares it any more.
        """
        since = time.monotonic()
        while (group := self._group(line)) is None:
            self._check_alive(line, time.monotonic() - since)
            time.sleep(LOOK_EVERY)
        if group not in self._opened:
            self._opened[group] = open_prepared(self._listed()["folders"][group]).train
        return self._opened[group]

    def is_ready(self, line: int, verify: bool = False) -> bool:
        """Whether `store(line)` need not wait; `verify` compares its files with their hashes, once.

        Raises DataError where this process started one that prepares, and that has died, or for damage.
        """
        if self._group(line) is None and self._process is not None:
            self._check_alive(line, 0.0)
        if (group := self._group(line)) is None:
            return False
        store = self.store(line)
        if verify and group not in self._verified:
            store.verify()
            self._verified.add(group)
        return True

    def used(self, lines: int) -> list[str]:
        """Hashes of the groups of the first `lines` lines: what their order was drawn from."""
        found: list[str] = []
        for line in range(lines):
            if (store := self.store(line)).hash in found:
                break
            found.append(store.hash)
        return found

    def check(self, used: list[str]) -> None:
        """Raise DataError where groups are no longer those that were `used`."""
        for i, (was, now) in enumerate(zip_longest(used, self.used(len(used)))):
            if was != now:
                raise DataError(
                    f"group {i} of {self.first.folder} is not the one this run was trained on "
                    f"({was[:12]}, now {now[:12] if now else 'gone'}): restore it, or use --fresh"
                )

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A process prepares the groups that are missing; it ends with this block, or with this process."""
        if self._listed()["complete"]:
            yield
            return
        paths = os.pathsep.join([str(HOUSE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "data.groups", str(self.first.folder)]
        # A session of its own: Ctrl-C is for the training, which then closes the input of this process.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self.settings.model_dump_json() + "\n")
            self._process.stdin.flush()
            yield
        finally:
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def prepare_rest(self, console: Any) -> None:
        """Prepare and list every group that is missing; one process at a time."""
        with open(self.list.with_suffix(".lock"), "w") as lock:
            locked(lock, wait=True)
            last, folders, spent = self.first, [str(self.first.folder)], _spent(self.first)
            try:
                while (asked := self._next(last, spent)) is not None:
                    last = prepare_one(asked, console, workers=1)
                    folders, spent = [*folders, str(last.folder)], spent + _spent(last)
                    self._write(folders, complete=False)
                self._write(folders, complete=True)
            except (DataError, OSError) as error:
                self._write(folders, complete=False, failed=str(error))
                raise

    def _next(self, last: Prepared, spent: int) -> DataSettings | None:
        """How the group after `last` is prepared; None where the text or its limit has ended."""
        s, most = self.settings, self.settings.group_bytes
        assert most is not None
        if "read" not in last.summary:
            raise DataError(f"{last.folder} does not say how much of its source it is; {mend(last.folder)}")
        left = most if s.max_bytes is None else min(most, s.max_bytes - spent)
        skip = last.summary["read"]
        rest = open_source(s.source).documents(start=skip)
        if last.summary["ended"] or left <= 0 or all(document.fault is not None for document in rest):
            return None
        return beside(s, self.first, s.source, left).model_copy(update={"skip": skip, "label": s.label})

    def _write(self, folders: list[str], complete: bool, failed: str | None = None) -> None:
        # An earlier process may have come farther; its groups are walked through again.
        folders = max(folders, self._listed()["folders"], key=len)
        write_json(self.list, {"folders": folders, "complete": complete, "failed": failed})

    def _listed(self) -> dict[str, Any]:
        if not self.list.is_file():
            return {"folders": [str(self.first.folder)], "complete": False, "failed": None}
        listed = read_json(self.list)
        # A damaged group is mended by deleting its folder: it is then prepared again, and listed as before.
        there = list(takewhile(lambda one: (Path(one) / "prepared.json").is_file(), listed["folders"]))
        return listed if there == listed["folders"] else listed | {"folders": there, "complete": False}

    def _group(self, line: int) -> int | None:
        if line not in self._found:
            listed = self._listed()
            count = len(listed["folders"])
            if line < count or listed["complete"]:
                self._found[line] = line % count
        return self._found.get(line)

    def _check_alive(self, line: int, waited: float) -> None:
        listed, what = self._listed(), f"group {line} of {self.first.folder} is not prepared"
        again = "the same command goes on from the last checkpoint"
        if self._process is not None:
            if (status := self._process.poll()) is not None and self._group(line) is None:
                said = listed["failed"] or f"it ended with status {status}"
                raise DataError(f"{what}, and the process that prepares it has died: {said}; {again}")
        elif waited > PATIENCE and not self._is_held() and self._group(line) is None:
            said = listed["failed"] or "no process works on it"
            raise DataError(f"{what}: {said}; {again}")

    def _is_held(self) -> bool:
        """Whether a process prepares groups now."""
        try:
            with open(self.list.with_suffix(".lock"), "a") as lock:
                return locked(lock) is False
        except OSError:  # of somebody else, to be read only
            return False


def _spent(prepared: Prepared) -> int:
    """Bytes of text of the source in a group, copies of held-out text included."""
    return prepared.summary["bytes_read"]


def main() -> None:
    try:
        settings = DataSettings.model_validate_json(lines_of_starter().get())
        Groups(settings, open_prepared(Path(sys.argv[1]))).prepare_rest(Silent())
    except (DataError, OSError) as error:
        print(f"preparing groups of text: {error}", file=sys.stderr)
        os._exit(2)
    except KeyboardInterrupt:  # nobody waits for it any more
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
