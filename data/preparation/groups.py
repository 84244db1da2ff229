"""Prepare text during training, in groups. Each group is a prepared folder.

The first group determines the tokenizer and the validation text. A background process prepares the other
groups with that tokenizer and removes copies of that validation text. Training reads one group after another,
each in its own order, and then repeats them. The order is a function of settings and text alone and does not
depend on the progress of preparation. A list of groups, updated whenever a group is complete, records
which groups are ready.
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

from data.data_settings import DataSettings
from data.files import locked, read_json, write_json
from data.preparation.prepare import further_text, prepare_one
from data.preparation.prepared import PreparedData, open_prepared
from data.preparation.processes import start_child, stdin_lines, stop_child
from data.preparation.summary import NullConsole
from data.sources import open_source
from data.store import TokenStore, hint
from errors import DataError

POLL_INTERVAL = 0.2  # seconds
PATIENCE = 60  # seconds within which a preparing process must start


class TextGroups:
    """The groups of data.source. The first group is already prepared."""

    def __init__(self, settings: DataSettings, first: PreparedData):
        self.settings = settings
        self.first = first
        self.list = first.folder / f"groups-{settings.max_bytes or 'all'}.json"
        self._process: subprocess.Popen | None = None
        self._opened: dict[int, TokenStore] = {0: first.train}
        # token streams known to be ready, which need no further lookup
        self._found: dict[int, int] = {}
        self._verified = {0}  # group 0 is verified when it is opened

    def store(self, stream: int) -> TokenStore:
        """Return the text of a token stream: the group of the same index or, after the last group, the groups
        again. Blocks until it is ready.

        Raises DataError if the group is missing and no process prepares it.
        """
        since = time.monotonic()
        while (group := self._group(stream)) is None:
            self._check_alive(stream, time.monotonic() - since)
            time.sleep(POLL_INTERVAL)
        if group not in self._opened:
            self._opened[group] = open_prepared(self._listed()["folders"][group]).train
        return self._opened[group]

    def is_ready(self, stream: int, verify: bool = False) -> bool:
        """Whether `store(stream)` returns without waiting. `verify` also compares the files with their
        hashes, once per group.

        Raises DataError if the files are damaged or if the preparing process that this object started has
        died.
        """
        if self._group(stream) is None and self._process is not None:
            self._check_alive(stream, 0.0)
        if (group := self._group(stream)) is None:
            return False
        store = self.store(stream)
        if verify and group not in self._verified:
            store.verify()
            self._verified.add(group)
        return True

    def used(self, streams: int) -> list[str]:
        """Hashes of the groups that the first `streams` token streams use."""
        found: list[str] = []
        for stream in range(streams):
            if (store := self.store(stream)).hash in found:
                break
            found.append(store.hash)
        return found

    def check(self, used: list[str]) -> None:
        """Raise DataError if the current groups differ from `used`."""
        for i, (was, now) in enumerate(zip_longest(used, self.used(len(used)))):
            if was != now:
                raise DataError(
                    f"group {i} of {self.first.folder} has changed since this run was trained "
                    f"({was[:12]}, now {now[:12] if now else 'missing'}); restore it or use --restart"
                )

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Prepare the missing groups in a subprocess, which exits with this block or with this process."""
        if self._listed()["complete"]:
            yield
            return
        request = self.settings.model_dump_json()
        self._process = start_child("data.preparation.groups", self.first.folder, request)
        try:
            yield
        finally:
            stop_child(self._process)
            self._process = None

    def prepare_rest(self, console: Any) -> None:
        """Prepare and list every missing group. A lock ensures that only one process does so at a time."""
        with open(self.list.with_suffix(".lock"), "w") as lock:
            locked(lock, wait=True)
            last = self.first
            folders = [str(self.first.folder)]
            spent = self.first.summary["bytes_read"]
            try:
                while (settings := self._next(last, spent)) is not None:
                    last = prepare_one(settings, console, workers=1)
                    folders = [*folders, str(last.folder)]
                    spent = spent + last.summary["bytes_read"]
                    self._write(folders, complete=False)
                self._write(folders, complete=True)
            except (DataError, OSError) as error:
                self._write(folders, complete=False, failed=str(error))
                raise

    def _next(self, last: PreparedData, spent: int) -> DataSettings | None:
        """Settings to prepare the group after `last`; None if the text or the byte limit is exhausted."""
        s = self.settings
        most = self.settings.group_bytes
        assert most is not None
        if "read" not in last.summary:
            raise DataError(
                f"{last.folder} does not record which part of its source it has; {hint(last.folder)}"
            )
        left = most if s.max_bytes is None else min(most, s.max_bytes - spent)
        skip = last.summary["read"]
        rest = open_source(s.source).documents(start=skip)
        if (
            last.summary["ended"]
            or left <= 0
            or all(document.fault is not None for document in rest)
        ):
            return None
        return further_text(s, self.first, s.source, left).model_copy(
            update={"skip": skip, "label": s.label}
        )

    def _write(self, folders: list[str], complete: bool, failed: str | None = None) -> None:
        # Keep the longer list: an earlier process may have prepared more groups than this one has visited.
        folders = max(folders, self._listed()["folders"], key=len)
        write_json(self.list, {"folders": folders, "complete": complete, "failed": failed})

    def _listed(self) -> dict[str, Any]:
        if not self.list.is_file():
            return {"folders": [str(self.first.folder)], "complete": False, "failed": None}
        listed = read_json(self.list)
        # The user repairs a damaged group by deleting its folder. The group is then prepared and listed
        # again.
        there = list(
            takewhile(lambda one: (Path(one) / "prepared.json").is_file(), listed["folders"])
        )
        return (
            listed if there == listed["folders"] else listed | {"folders": there, "complete": False}
        )

    def _group(self, stream: int) -> int | None:
        if stream not in self._found:
            listed = self._listed()
            count = len(listed["folders"])
            if stream < count or listed["complete"]:
                self._found[stream] = stream % count
        return self._found.get(stream)

    def _check_alive(self, stream: int, waited: float) -> None:
        if self._process is not None:
            status = self._process.poll()
            is_dead = status is not None
            reason = f"the process that prepares it exited with status {status}"
        else:
            is_dead = waited > PATIENCE and not self._is_held()
            reason = "no process prepares it"
        if is_dead and self._group(stream) is None:
            reason = self._listed()["failed"] or reason
            raise DataError(
                f"group {stream} of {self.first.folder} is not prepared: {reason}. Run the same command "
                "again to resume from the last checkpoint"
            )

    def _is_held(self) -> bool:
        """Whether any process is preparing groups."""
        try:
            with open(self.list.with_suffix(".lock"), "a") as lock:
                return locked(lock) is False
        except OSError:  # owned by another user and read-only
            return False


def main() -> None:
    """In a child: prepare the missing groups of a folder. The settings are the first line of its input."""
    try:
        settings = DataSettings.model_validate_json(stdin_lines().get())
        TextGroups(settings, open_prepared(sys.argv[1])).prepare_rest(NullConsole())
    except (DataError, OSError) as error:
        print(f"preparing groups of text: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except KeyboardInterrupt:  # the parent process has ended
        os._exit(1)
    os._exit(0)
