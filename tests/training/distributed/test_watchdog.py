"""Which waiting time the watchdog counts. Lost processes: distributed/test_ranks.py."""

import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from errors import FAILED, RANK_LOST, REQUEUE
from model.attention.sharding import is_broken_link
from training.distributed.watchdog import Stopwatch, Watchdog, heartbeats_of


def test_clock_jump_counts_as_one_poll():
    """A machine that slept for a day, or a clock set back, has seen nothing happen."""
    clock = SimpleNamespace(now=100.0)
    watch = Stopwatch(lambda: clock.now, interval=1.0)
    assert watch.seconds("a") == 0
    for jump, expected in ((1.0, 1.0), (1.0, 2.0), (86_400.0, 4.0), (-5_000.0, 4.0), (1.0, 5.0)):
        clock.now += jump
        assert watch.seconds("a") == expected
    clock.now += 1
    assert watch.seconds("b") == 0


def test_single_process_has_no_watchdog(tmp_path):
    with Watchdog(tmp_path / "run", "a", 0, 1, 1e-9) as watch, watch.collective("step 1"):
        pass
    assert not list(tmp_path.iterdir())


def test_consecutive_slow_steps_do_not_time_out(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(Watchdog, "_exit", lambda self, text: left.append(text))
    with Watchdog(tmp_path / "run", "a", 1, 2, 0.2) as watch:
        for number in range(4):
            with watch.collective(f"step {number}"):
                watch._done.wait(0.1)
        assert left == []
        with watch.collective("step 9"):
            watch._done.wait(0.6)
    assert left and left[0] == "step 9 has not finished within 0.2 s: another process hangs"


@pytest.mark.parametrize(("rank", "peer"), [(1, 0), (0, 1)])
def test_slow_rank_with_heartbeat_is_not_lost(tmp_path, monkeypatch, rank, peer):
    left = []
    run = tmp_path / "run"
    monkeypatch.setattr(Watchdog, "_exit", lambda self, text: left.append(text))
    other = Watchdog(run, "a", peer, 2, 0.2)
    beats = heartbeats_of(run)
    beats.mkdir(parents=True)
    (beats / str(peer)).write_text("b 7")  # of an earlier attempt
    with Watchdog(run, "a", rank, 2, 0.2) as watch:
        watch._done.wait(0.4)
        with other:
            watch._done.wait(0.6)
        watch._done.wait(0.6)  # it has ended as it should
        assert left == []
        beats.mkdir(parents=True, exist_ok=True)
        (beats / str(peer)).write_text("a 7")  # of one that was killed
        watch._done.wait(0.6)
    assert left and left[0] == f"process {peer} sent no heartbeat for 0.2 s: it is dead or hangs"
    assert [file.name for file in beats.iterdir()] == [str(peer)]
    (beats / str(peer)).unlink()
    with Watchdog(run, "c", rank, 2, 9):
        pass
    assert not list(tmp_path.iterdir())  # the last one tidies up


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose processes end by SystemExit, for a test to see."""
    monkeypatch.setattr("os._exit", sys.exit)
    return tmp_path / "run"


def fail(run, rank, error, attempt="a", world=3):
    """What a process leaves with that fails by an error of its own, or of its link to the others."""
    with pytest.raises((SystemExit, type(error))) as caught, Watchdog(run, attempt, rank, world, 9):
        raise error
    return caught.value.code if isinstance(caught.value, SystemExit) else None


LINK = RuntimeError("[gloo] Connection closed by peer")


def test_error_on_one_rank_is_raised_on_others(run, capsys):
    assert fail(run, 2, ValueError("x.txt: no room\nhere"), attempt="of before") is None
    assert fail(run, 0, LINK) == RANK_LOST and fail(run, 0, SystemExit(REQUEUE)) == REQUEUE
    assert (
        "the connection to another process was lost ([gloo] Connection closed by peer) (tr"
        in capsys.readouterr().err
    )
    assert fail(run, 2, ValueError("x.txt: no room\nhere")) is None
    assert fail(run, 0, LINK) == FAILED == fail(run, 1, SystemExit(REQUEUE))
    message = "process 2 failed: x.txt: no room"
    assert (
        capsys.readouterr().err == f"error: (process 0) {message}\nerror: (process 1) {message}\n"
    )
    # for those who listen to it alone
    assert (heartbeats_of(run) / "0").read_text() == f"a {message}"


def test_error_on_other_rank_stops_this_rank(run, monkeypatch, capsys):
    left = []
    monkeypatch.setattr("os._exit", left.append)
    monkeypatch.setattr("training.distributed.watchdog._GRACE", 0.3)
    with Watchdog(run, "a", 0, 2, 6.0) as watch:
        assert fail(run, 1, TypeError(), world=2) is None
        watch._done.wait(1.0)
    assert left and set(left) == {FAILED}
    assert capsys.readouterr().err.startswith("error: (process 0) process 1 failed: TypeError\n")


def test_connection_errors_are_classified():
    assert is_broken_link(dist.DistNetworkError("reset"))
    assert is_broken_link(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"))
    assert not is_broken_link(RuntimeError("CUDA out of memory")) and not is_broken_link(
        ValueError("gloo")
    )
