"""Standard output, standard error, and exit statuses of scripts."""

import errno
import os

import pytest

from data.files import atomic
from errors import DataError, EvaluationError
from model import ModelError
from run_directory import console as module
from run_directory.console import Console, duration
from settings.load import ConfigError
from settings.script import run_main


def test_lines_go_to_stderr_and_tables_to_stdout(capsys):
    console = Console()
    console.info("hello [not markup]")
    console.warn("careful")
    console.table("A title", ["name", "nll"], [["rope [1]", 2.5], ["alibi", "10.25"]])
    out, err = capsys.readouterr()
    assert err == "hello [not markup]\nwarning: careful\n"
    assert "A title" in out and "rope [1]" in out
    rows = [line for line in out.splitlines() if "rope" in line or "alibi" in line]
    assert rows[0].index("2.5") > rows[1].index("10.25")  # right-aligned


def test_control_characters_are_escaped(capsys):
    hostile = "a\x1b[2Jb\x9bc\rd\udcff\u202ee\x00\tf\ng é天"
    shown = "a\\x1b[2Jb\\x9bc\\rd\\udcff\\u202ee\\x00\tf\ng é天"
    console = Console()
    console.info(hostile)
    console.warn(hostile)
    assert capsys.readouterr().err == f"{shown}\nwarning: {shown}\n"
    assert end_of(DataError(hostile), capsys) == (2, f"error: {shown}\n")
    console.table("\x1b[1m", ["a\x1b"], [["x\x1b[2J"]])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "x\\x1b[2J" in out


def test_progress_lines_without_terminal(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Console(interval=10).bar("train", 200, "step") as bar:
        for _ in range(40):
            now[0] += 1
            bar.advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train: 25% (50 of 200 step), 5 step/s, 30 s left",
        "train: 50% (100 of 200 step), 5 step/s, 20 s left",
        "train: 75% (150 of 200 step), 5 step/s, 10 s left",
        "train: done, 200 step in 40 s (5 step/s)",
    ]


@pytest.mark.parametrize(
    ("seconds", "overrides"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (100, "1 min 40 s"),
        (7300, "2 h 1 min"),
        (359_000, "99 h 43 min"),
        (1e6, "12 days"),
        (729 * 86400, "729 days"),
        (730 * 86400, "2 years"),
        (1e9, "32 years"),
        (1.3e11, "4,119 years"),
    ],
)
def test_duration(seconds, overrides):
    assert duration(seconds) == overrides


def end_of(error, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        run_main(main)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("kind", [ConfigError, ModelError, DataError, EvaluationError])
def test_user_errors_of_every_package_end_with_one_line(kind, capsys):
    assert end_of(kind("the fix"), capsys) == (2, "error: the fix\n")


def test_files_and_interrupts(capsys, tmp_path):
    assert end_of(FileNotFoundError(2, "No such file", "a.txt"), capsys) == (
        2,
        "error: a.txt: No such file\n",
    )
    assert end_of(OSError("odd"), capsys) == (2, "error: odd\n")
    assert end_of(KeyboardInterrupt(), capsys)[0] == 130


def test_bugs_keep_their_traceback():
    for bug in (ValueError("shape"), KeyError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")):

        def main(bug=bug):
            raise bug

        with pytest.raises(type(bug)):
            run_main(main)


def test_status_of_a_main_that_returns():
    for value, code in ((None, 0), (0, 0), (3, 3)):
        with pytest.raises(SystemExit) as end:
            run_main(lambda value=value: value)
        assert end.value.code == code


def test_full_disk_error_names_file_and_fix(capsys, tmp_path):
    def main():
        with atomic(tmp_path / "shard") as file:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SystemExit):
        run_main(main)
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path / 'shard'}: No space left") and "free space" in err
    assert not list(tmp_path.iterdir())
