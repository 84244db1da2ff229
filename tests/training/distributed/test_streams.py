"""Training while data are still being prepared: one process, and two."""

import json
from pathlib import Path

import pytest

from errors import REQUEUE
from run_directory.checkpoints import steps_of
from tests.training.distributed.ranks import BUSY
from tests.training.distributed.test_ranks import WORDS, lines, run_scenarios

STEPS = 75  # past the last group, so that all come again


@pytest.fixture(scope="module")
def results(corpus, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("streams")
    overrides = [
        *WORDS,
        f"data.source.path={corpus}",
        "data.group_bytes=4000",
        "data.max_bytes=12000",
    ]
    overrides += [f"training.tokens={STEPS * 8 * 24}", "training.checkpoint.interval=5"]
    return folder, run_scenarios("streams", folder, [str(folder), *overrides])


@pytest.mark.parametrize(("name", "ranks"), [("waiting alone", 1), ("waiting", 2)])
def test_signal_during_data_wait_saves_and_exits_all_ranks(results, name, ranks):
    found = results[1][name]
    assert found["early"] == [None] * ranks, found["logs"]  # waiting is not hanging
    assert found["statuses"] == [REQUEUE] * ranks, found["logs"]
    assert found["seconds"] < BUSY and found["children"] == 1 and found["left"] == []
    assert found["threads"] == [["MainThread"]] * ranks
    assert "waiting for group 1 of the text" in found["logs"][0] and "to resume" in found["logs"][0]


def test_resumed_ranks_read_same_data_as_one_process(results):
    folder = results[0]
    found = results[1]["killed"]
    assert results[1]["one"]["statuses"] == [0], results[1]["one"]["logs"]
    assert found["statuses"] == [0, 0], found["logs"]
    assert found["killed"]["statuses"] == [-9, -9], found["killed"]["logs"]
    one, two = ({line["step"]: line for line in lines(folder / name)} for name in ("one", "two"))
    assert sorted(one) == sorted(two) == list(range(1, STEPS + 1))
    assert [one[step]["data"] for step in one] == [two[step]["data"] for step in one]
    assert [one[step]["targets"] for step in one] == [two[step]["targets"] for step in one]
    assert all(abs(one[step]["loss"] - two[step]["loss"]) < 1e-4 for step in one)
    assert {line["attempt"] for line in two.values()} == {1, 2, 3}
    # until the other sees it, too
    assert "waiting for group 1 of the text" in found["killed"]["logs"][0]
    listed = json.loads(next((folder / "text-two").glob("*/groups-*.json")).read_text())
    assert listed["complete"] and 2 < len(listed["folders"]) <= one[STEPS]["epoch"]


def test_failed_preparation_stops_all_ranks(results):
    found = results[1]["dying"]
    main, other = found["logs"]
    assert found["statuses"] == [2, 2], found["logs"]
    assert "the process that prepares it exited with status -9" in main
    assert "error: (process 1) process 0 failed: group 1 of " in other
    assert steps_of(results[0] / "dying")
