"""scripts/launch with stand-ins for SLURM and the other machines."""

import os
import subprocess

import pytest

from errors import RANK_LOST, REQUEUE
from tests.files import ROOT

STANDINS = {
    # Two nodes with tasks 3 and 1; the arguments of srun, and the highest status of its tasks.
    "srun": """#!/usr/bin/env bash
echo "srun $1" >> "$ARGUMENTS"; shift
worst=0
for task in "0 0 0" "1 1 0" "2 2 0" "3 0 1"; do
    read -r procid localid nodeid <<< "$task"
    SLURM_PROCID=$procid SLURM_LOCALID=$localid SLURM_NODEID=$nodeid "$@"
    status=$?; if [ $status -gt $worst ]; then worst=$status; fi
done
exit $worst
""",
    "scontrol": """#!/usr/bin/env bash
if [ "$1" = show ]; then echo node-a; echo node-b; else echo "scontrol $*" >> "$ARGUMENTS"; fi
""",
    "python": """#!/usr/bin/env bash
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $*" >> "$ARGUMENTS"
exit "$STATUS"
""",
    "launcher": """#!/usr/bin/env bash
echo "$*" >> "$ARGUMENTS"
""",
}


@pytest.fixture
def standins(tmp_path):
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
    line = ["bash", str(ROOT / "scripts" / "launch" / script), *words]
    return subprocess.run(
        line,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("status", [0, 2, REQUEUE, RANK_LOST])
def test_slurm_tasks_rendezvous_and_requeue(standins, status):
    arguments = standins / "arguments"
    done = run(
        "slurm.sh",
        "configs/tiny.yaml",
        "seed=1",
        PATH=f"{standins}:{os.environ['PATH']}",
        PYTHON=str(standins / "python"),
        ARGUMENTS=str(arguments),
        STATUS=str(status),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="123456",
        SLURM_JOB_NODELIST="node-[a-b]",
        SLURM_NTASKS="4",
        SLURM_STEP_TASKS_PER_NODE="3,1",
    )
    assert done.returncode == status, done.stderr
    lines = arguments.read_text().splitlines()
    assert lines[0] == "srun --kill-on-bad-exit=1"
    words = "node-a:23456 train.py configs/tiny.yaml seed=1 training.parallel.processes=4"
    ranks = ("0/4 0/3", "1/4 1/3", "2/4 2/3", "3/4 0/1")
    assert lines[1:5] == [f"{rank} {words}" for rank in ranks]
    assert lines[5:] == (["scontrol requeue 123456"] if status in (REQUEUE, RANK_LOST) else [])


@pytest.mark.parametrize(
    ("option", "config"), [("", "many_nodes"), ("--sharded", "many_nodes_fsdp")]
)
def test_node_starts_its_processes(standins, option, config):
    arguments = standins / "arguments"
    environment = {"PYTHON": str(standins / "launcher"), "ARGUMENTS": str(arguments)}
    words = f"--node 1 --nodes 3 --gpus 8 --host first {option} -- configs/base.yaml".split()
    done = run("multi_node.sh", *words, **environment)
    assert done.returncode == 0, done.stderr
    line = (
        f"-m accelerate.commands.launch --config_file configs/accelerate/{config}.yaml "
        "--num_machines 3 --num_processes 24 --machine_rank 1 "
        "--main_process_ip first --main_process_port 29500 "
        "train.py configs/base.yaml training.parallel.processes=24"
    )
    assert arguments.read_text().split() == line.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node", "0"], "--host"),
        (["--nod", "0"], "--nod;"),
        (["x.yaml"], "x.yaml"),
    ],
)
def test_missing_requirements_are_named(words, message):
    done = run("multi_node.sh", *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
