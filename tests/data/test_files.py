"""Atomic writes and locks."""

import errno
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


def test_lock_is_exclusive(tmp_path):
    file = tmp_path / "lock"
    with locked(file) as mine:
        assert mine
        with locked(file) as theirs:
            assert not theirs
        with locked(file) as still:  # a failed attempt does not release it
            assert not still
    with locked(file) as free:
        assert free
