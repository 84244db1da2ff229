"""scripts/run_harness.py as a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.harness.models import byte_run

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "run_harness.py"


def test_models_of_the_harness_are_registered_too():
    """And packages with the names of our scripts are found."""
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from interop.harness import register_model; register_model()\n"
        "from lm_eval.api.registry import model_registry\n"
        "import evaluate; assert hasattr(evaluate, 'load')\n"
        "assert {'sextant', 'hf', 'vllm', 'local-completions'} <= set(model_registry)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_command_line(tmp_path, processes):
    run = byte_run(tmp_path / "run")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *(launcher if processes > 1 else []), SCRIPT, "--model", "sextant"]
    command += ["--model_args", f"run={run},method=yarn,max_length=128", "--limit", "5"]
    command += ["--tasks", "sextant_recall", "--metadata", '{"lengths": [128], "items": 4}']
    done = subprocess.run(
        [*command, "--output_path", tmp_path / "out"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(file.read_text())
    assert found["config"]["overrides"] and found["config"]["max_length"] == 128
    assert 0 <= found["results"]["sextant_recall_128"]["acc,none"] <= 1
