"""A child process exits with its parent and leaves no incomplete file."""

import subprocess
import sys
from pathlib import Path

import pytest

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
def test_child_exits_with_parent(tmp_path, deaf):
    """At once, with no incomplete file; also within a call that blocks signals."""
    code = CHILD.format(
        deaf="signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])" if deaf else ""
    )
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
