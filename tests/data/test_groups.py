"""Text prepared in groups during training: a fixed order, and errors if preparation dies."""

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import data.files
import data.preparation.groups
from data import BatchSampler, DataError, DataSettings, prepare
from data.preparation.groups import TextGroups
from data.preparation.summary import NullConsole
from data.sampling.batches import TrainingText
from data.sampling.segments import Segment
from run_directory.run import locked_run
from tests.data.conftest import make_text
from tests.data.test_prepare import Listener


@pytest.fixture(params=["jsonl", pytest.param("hub", marks=pytest.mark.slow)])
def grouped(request, tmp_path) -> DataSettings:
    """90 documents in one file of records, read whole or streamed, in groups of 30 kB."""
    rng = random.Random(3)
    file = tmp_path / "records.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": make_text(rng, rng.randrange(20, 200))}) + "\n" for _ in range(90)
        )
    )
    if request.param == "hub":
        pytest.importorskip("datasets")
        source = {"name": "hub", "path": "json", "data_files": str(file)}
    else:
        source = {"name": "files", "path": str(file)}
    return DataSettings.model_validate(
        {
            "source": source,
            "tokenizer": {"name": "sentencepiece", "vocab_size": 300},
            "valid_fraction": 0.2,
            "group_bytes": 30_000,
            "root": str(tmp_path / "prepared"),
        }
    )


def batches_of(groups: TextGroups) -> BatchSampler:
    return BatchSampler(
        [TrainingText(groups.first.train, groups=groups)],
        [Segment(64, 16)],
        packing="concat",
        seed=5,
    )


def test_groups_are_read_in_order_once(grouped):
    groups = TextGroups(grouped, prepare(grouped, workers=1))
    batches = batches_of(groups)
    with groups.preparing():  # as training does; the first steps do not wait
        hashes = [batches.batch(step).hash for step in range(70)]
        used = batches.groups_used(70)
    folders = json.loads(groups.list.read_text())["folders"]
    assert len(folders) >= 3 and len(set(used)) == len(used) >= 3
    names = [name for line in range(len(folders)) for name in groups.store(line).names]
    held = groups.first.valid.names
    assert len(set(names)) == len(names) and not set(names) & set(held)
    assert sorted([*names, *held], key=lambda name: int(name.split("#")[1])) == [
        f"{names[0].split('#')[0]}#{n}" for n in range(90)
    ]
    assert len({groups.store(line).manifest["tokenizer"] for line in range(len(folders))}) == 1
    # Everything sealed before: the same order, at any step alone; past the last group all come again.
    later = TextGroups(grouped, prepare(grouped, workers=1))
    assert [batches_of(later).batch(step).hash for step in (69, 3, 31)] == [
        hashes[s] for s in (69, 3, 31)
    ]
    assert later.store(len(folders)).hash == later.store(0).hash
    later.check(used)
    with pytest.raises(DataError, match=r"group 1 of .* has changed"):
        later.check([used[0], used[2]])
    with pytest.raises(DataError, match=rf"group {len(folders)} of .* \(another, now missing\)"):
        later.check([*used[: len(folders)], "another"])
    listed = groups.list.read_bytes()
    groups.list.write_bytes(listed[:20])  # as it is seen while it is replaced
    assert later.store(1).hash == used[1] and later.is_ready(1)
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        later.is_ready(99)
    groups.list.write_bytes(listed)
    with later.preparing():
        assert later._process is None  # nothing is left to prepare


def test_failed_preparation_is_reported_and_resumed(grouped, monkeypatch):
    monkeypatch.setattr(data.preparation.groups, "PATIENCE", 0.3)
    groups = TextGroups(grouped, prepare(grouped, workers=1))
    with pytest.raises(DataError, match=r"group 1 of .* is not prepared: no process"):
        groups.store(1)
    with groups.preparing():
        assert groups._process is not None
        os.kill(groups._process.pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"exited with status -9"):
            groups.store(1)
    real = data.preparation.groups.prepare_one
    monkeypatch.setattr(data.preparation.groups, "prepare_one", lambda *a, **k: _full())
    with pytest.raises(OSError, match="No space left"):
        groups.prepare_rest(NullConsole())
    with pytest.raises(DataError, match=r"group 1 of .* is not prepared: .*No space left"):
        groups.store(1)
    monkeypatch.setattr(data.preparation.groups, "prepare_one", real)
    groups.prepare_rest(NullConsole())
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits for a group that exists"))
    assert groups.store(1).n_documents


def _full():
    raise OSError(28, "No space left on device")


def test_size_limit_ends_groups(grouped):
    limited = grouped.model_copy(update={"max_bytes": 45_000})
    groups = TextGroups(limited, prepare(limited, workers=1))
    groups.prepare_rest(NullConsole())
    listed = json.loads(groups.list.read_text())
    assert listed["complete"] and len(listed["folders"]) == 2
    total = (
        sum(groups.store(line).bytes.sum() for line in range(2)) + groups.first.valid.bytes.sum()
    )
    assert 43_000 < total < 48_000


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, pytest.param(errno.EOPNOTSUPP, marks=pytest.mark.slow)]
)
def test_file_system_without_locks_warns_once(settings, tmp_path, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(data.files.fcntl, "flock", refuse)
    grouped = settings.model_copy(update={"group_bytes": 20_000})
    console = Listener()
    groups = TextGroups(grouped, prepare(grouped, console, workers=1))
    assert sum("without locks" in line for line in console.lines) == 1
    monkeypatch.setattr(data.preparation.groups, "PATIENCE", 0.2)
    with pytest.raises(DataError, match="no process prepares it"):
        groups.store(1)
    groups.prepare_rest(Listener())
    assert groups.store(1).n_documents
    with locked_run(tmp_path / "run"), locked_run(tmp_path / "run"):
        pass


def test_streams_of_a_step_are_known_in_advance(settings, monkeypatch):
    settings = settings.model_copy(update={"group_bytes": 25_000})
    groups = TextGroups(settings, prepare(settings, workers=1))
    batches = batches_of(groups)
    # waiting for a stream raises an error
    monkeypatch.setattr(data.preparation.groups, "PATIENCE", -1)
    early = [batches.is_within(step, 0) for step in range(40)]
    assert early[0] and not early[-1] and not groups.is_ready(1)
    groups.prepare_rest(Listener())
    assert groups.is_ready(1) and groups.is_ready(99)
    last = [
        max(int(part.epoch.max()) for part in batches.windows(step, step + 1)) for step in range(40)
    ]
    assert early == [stream == 0 for stream in last]
    for step in (0, 7, 19, 39):
        assert [batches.is_within(step, stream) for stream in range(9)] == [
            stream >= last[step] for stream in range(9)
        ]
    assert last[-1] > 1


def test_modified_group_is_reported_and_recreated_if_deleted(settings):
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
    with pytest.raises(
        DataError, match=rf"{shard} does not match its recorded hash.*delete {group} and prepare"
    ):
        TextGroups(settings, first).is_ready(1, verify=True)
    shard.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=rf"{shard.name} is damaged.*delete {group} and prepare"):
        TextGroups(settings, first).is_ready(1)
    shutil.rmtree(group)
    repaired = TextGroups(settings, first)
    with repaired.preparing():
        assert repaired.used(3) == hashes[:3] and repaired.is_ready(1, verify=True)
        assert repaired.store(99).hash in hashes  # once all are listed again
