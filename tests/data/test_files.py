"""Atomic writes and locks."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from data.files import _host, atomic, locked, save_array


def test_failed_write_keeps_old_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"), atomic(path) as file:
        file.write(b"half")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_array_size_mismatch_names_file(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    file = tmp_path / "hashes.npy"
    draft = file.with_name(f".{file.name}.{_host()}.{os.getpid()}.tmp")
    draft.symlink_to("/dev/full")
    with pytest.raises(OSError) as error:
        save_array(file, np.arange(100_000))
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(file)
    assert not file.exists()


def test_lock_is_exclusive_unless_shared(tmp_path):
    with open(tmp_path / "lock", "w") as mine, open(tmp_path / "lock", "w") as theirs:
        assert locked(mine) is True
        assert locked(theirs) is False
        fcntl.flock(mine, fcntl.LOCK_UN)
        assert locked(theirs, shared=True) is True
        assert locked(mine, shared=True) is True
        assert locked(mine) is False
