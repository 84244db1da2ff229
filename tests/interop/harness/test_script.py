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
TASK = """
task: local_packages
dataset_path: json
dataset_kwargs: {data_files: DOCS, cache_dir: CACHE}
test_split: train
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " yes"
process_results: !function measured.process_results
metric_list: [{metric: installed, aggregation: mean, higher_is_better: true}]
"""
MEASURED = """
import evaluate
import lm_eval


def process_results(doc, results):
    return {"installed": float(hasattr(evaluate, "load") and hasattr(lm_eval, "simple_evaluate"))}
"""


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
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "docs.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{n}?"}) for n in range(5))
    )
    filled = TASK.replace("DOCS", str(folder / "docs.jsonl")).replace(
        "CACHE", str(folder / "cache")
    )
    (folder / "packages.yaml").write_text(filled)
    (folder / "measured.py").write_text(MEASURED)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        if processes > 1
        else []
    )
    words = [
        "--model",
        "sextant",
        "--model_args",
        f"run={run},method=yarn,max_length=128",
        "--limit",
        "5",
    ]
    for name, more in (
        ("local", ["--tasks", "local_packages", "--include_path", str(folder)]),
        ("ours", ["--tasks", "sextant_recall", "--metadata", '{"lengths": [128], "items": 4}']),
    ):
        out = tmp_path / name
        done = subprocess.run(
            [sys.executable, *launcher, SCRIPT, *words, *more, "--output_path", out],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (file,) = out.rglob("results*.json")
        found = json.loads(file.read_text())
        assert found["config"]["overrides"] and found["config"]["max_length"] == 128
        if name == "local":
            assert found["results"]["local_packages"]["installed,none"] == 1
        else:
            assert 0 <= found["results"]["sextant_recall_128"]["acc,none"] <= 1
