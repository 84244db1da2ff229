"""What is left when preparation is ended: no process, no half file; and disks that know no locks."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import data.files
import data.preparation.groups
import data.preparation.prepare
import data.sampling.batches
import data.sampling.segments
from data import DataError, prepare
from data.files import locked
from data.preparation.groups import TextGroups
from tests.data.test_prepare import Listener
from training.errors import TrainingError
from training.run.directory import held

HOUSE = Path(__file__).parents[2]
CHILD = """
import signal, sys, time
from pathlib import Path
from data.preparation.processes import stdin_lines
from data.files import atomic
lines = stdin_lines()
with atomic(Path(sys.argv[1])) as file:
    file.write(lines.get().encode())
    {deaf}
    print("half", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_a_child_ends_with_its_starter(tmp_path, deaf):
    """At once, with nothing half written; also in the middle of something that hears no signal."""
    code = CHILD.format(deaf="signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])" if deaf else "")
    file = tmp_path / "shard"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=HOUSE,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("text\n")
        child.stdin.flush()
        assert child.stdout.readline() == "half\n" and len(list(tmp_path.iterdir())) == 1
        child.stdin.close()
        child.wait(timeout=30)  # half of its own sleep: a busy machine takes its time
    assert deaf or not list(tmp_path.iterdir())


def test_drafts_of_killed_processes_go_with_the_next_preparation(settings):
    folder = data.preparation.prepare.prepared_folder(settings)
    (folder / "train").mkdir(parents=True)
    (folder / "train" / ".00000.tokens.77.tmp").write_text("half")
    assert prepare(settings, workers=1).folder == folder
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_told_once_and_stops_nothing(settings, tmp_path, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(data.files.fcntl, "flock", refuse)
    grouped, console = settings.model_copy(update={"group_bytes": 20_000}), Listener()
    groups = TextGroups(grouped, prepare(grouped, console, workers=1))
    assert sum("without locks" in line for line in console.lines) == 1
    monkeypatch.setattr(data.preparation.groups, "PATIENCE", 0.2)
    with pytest.raises(DataError, match="no process prepares it"):  # rather than for ever
        groups.store(1)
    groups.prepare_rest(Listener())
    assert groups.store(1).n_documents
    with held(tmp_path / "run"), held(tmp_path / "run"):
        pass


def test_a_lock_that_another_holds_is_not_ours(tmp_path):
    with open(tmp_path / "lock", "w") as mine, open(tmp_path / "lock", "w") as theirs:
        assert locked(mine) is True and locked(theirs) is False
        fcntl.flock(mine, fcntl.LOCK_UN)
        assert locked(theirs, shared=True) is True and locked(mine, shared=True) is True
        assert locked(mine) is False
    with held(tmp_path), pytest.raises(TrainingError, match="trained by another process"), held(tmp_path):
        pass


def test_the_second_to_prepare_a_folder_waits_for_the_first(tmp_path):
    entered = threading.Event()

    def enter():
        with data.preparation.prepare._alone(tmp_path, Listener()):
            entered.set()

    second = threading.Thread(target=enter)
    with open(tmp_path / ".lock", "w") as first:
        assert locked(first)
        second.start()
        assert not entered.wait(0.3)
    second.join()
    assert entered.is_set()


def test_which_lines_a_step_needs_is_known_without_them(settings, monkeypatch):
    """... and is what the batches then come from."""
    settings = settings.model_copy(update={"group_bytes": 25_000})
    groups = TextGroups(settings, prepare(settings, workers=1))
    batches = data.BatchSampler(
        [data.sampling.batches.TrainingText(groups.first.train, groups=groups)],
        [data.sampling.segments.Segment(64, 16)],
        packing="concat",
        seed=5,
    )
    monkeypatch.setattr(data.preparation.groups, "PATIENCE", -1)  # whoever waits for a line gets an error
    early = [batches.is_within(step, 0) for step in range(40)]
    assert early[0] and not early[-1] and not groups.is_ready(1)
    groups.prepare_rest(Listener())
    assert groups.is_ready(1) and groups.is_ready(99)
    last = [max(int(part.epoch.max()) for part in batches.windows(step, step + 1)) for step in range(40)]
    assert early == [line == 0 for line in last]
    for step in (0, 7, 19, 39):
        assert [batches.is_within(step, line) for line in range(9)] == [
            line >= last[step] for line in range(9)
        ]
    assert last[-1] > 1


def test_a_group_that_was_altered_is_found_and_mended_by_deleting_it(settings):
    settings = settings.model_copy(update={"group_bytes": 20_000})
    first = prepare(settings, workers=1)
    TextGroups(settings, first).prepare_rest(Listener())
    hashes = TextGroups(settings, first).used(99)
    group = Path(json.loads(TextGroups(settings, first).list.read_text())["folders"][1])
    shard = next((group / "train").glob("*.tokens"))
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 1
    shard.write_bytes(raw)
    assert TextGroups(settings, first).is_ready(1)
    with pytest.raises(DataError, match=rf"{shard} has another hash.*delete {group} and prepare"):
        TextGroups(settings, first).is_ready(1, verify=True)
    shard.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=rf"{shard.name} is damaged.*delete {group} and prepare"):
        TextGroups(settings, first).is_ready(1)
    shutil.rmtree(group)
    repaired = TextGroups(settings, first)
    with repaired.preparing():
        assert repaired.used(3) == hashes[:3] and repaired.is_ready(1, verify=True)
        assert repaired.store(99).hash in hashes  # once all are listed again
