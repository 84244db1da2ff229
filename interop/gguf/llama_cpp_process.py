"""llama.cpp in a process of its own, since its assertions abort the process.

As a script it reads a list of jobs and writes arrays: `python llama_cpp_process.py JOBS.json OUT.npz`.
llama-cpp-python is no dependency, because pip compiles it: `pip install llama-cpp-python`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from errors import InteropError

PACKAGE = "llama_cpp"
FLOAT32 = 0  # of the cache, so that the result does not depend on rounding to float16


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def run_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What llama.cpp computes.

    Args:
        jobs: each has `file`, and `ids`, tokens whose logits are computed, with `new`, a number of greedy
            tokens after them; or `texts`, whose ids are computed; or both.

    Returns:
        For each job `logits` (T, V) and `greedy`, `texts`, `decoded` and `first`, the first id of a text with
        its BOS.

    Raises:
        InteropError: llama.cpp does not load a file, or aborts.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs_file = Path(folder) / "jobs.json"
        out = Path(folder) / "out.npz"
        jobs_file.write_text(json.dumps(jobs))
        command = [sys.executable, __file__, str(jobs_file), str(out)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise InteropError(
                f"llama.cpp cannot run {', '.join(str(job['file']) for job in jobs)}: {reason}"
            )
        with np.load(out, allow_pickle=False) as found:
            results: list[dict[str, Any]] = [{"texts": [], "decoded": []} for _ in jobs]
            for name in found.files:
                number, key = name.split(" ", 1)
                if key.startswith(("texts", "decoded")):
                    results[int(number)][key.split()[0]].append(found[name])
                else:
                    results[int(number)][key] = found[name]
    for result in results:
        result["texts"] = [ids.tolist() for ids in result["texts"]]
        result["decoded"] = [text.tobytes().decode() for text in result["decoded"]]
    return results


def _main(jobs_file: str, out_file: str) -> None:
    llama_cpp = importlib.import_module(PACKAGE)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    found: dict[str, np.ndarray] = {}
    for number, job in enumerate(json.loads(Path(jobs_file).read_text())):
        for key, value in _run(llama_cpp, job).items():
            found[f"{number} {key}"] = value
    with open(out_file, "wb") as file:
        np.savez(file, allow_pickle=False, **found)


def _run(llama_cpp: Any, job: dict[str, Any]) -> dict[str, np.ndarray]:
    ids = list(job.get("ids", []))
    has_weights = "ids" in job
    llm = llama_cpp.Llama(
        job["file"],
        n_ctx=len(ids) + job.get("new", 0) + 1,
        logits_all=has_weights,
        vocab_only=not has_weights,
        type_k=FLOAT32,
        type_v=FLOAT32,
        n_threads=1,
        verbose=False,
    )
    found: dict[str, np.ndarray] = {}
    if has_weights:
        llm.eval(ids)
        found["logits"] = np.array(llm.scores[: len(ids)])
        for _ in range(job.get("new", 0)):
            ids.append(int(np.argmax(llm.scores[len(ids) - 1])))
            llm.eval(ids[-1:])
        found["greedy"] = np.array(ids[len(job["ids"]) :], dtype=np.int64)
    for i, text in enumerate(job.get("texts", [])):
        encoded = llm.tokenize(text.encode(), add_bos=False, special=False)
        found[f"texts {i:04}"] = np.array(encoded, dtype=np.int64)
        decoded = llm.detokenize(encoded).decode(errors="replace")
        found[f"decoded {i:04}"] = np.frombuffer(decoded.encode(), dtype=np.uint8)
    if texts := job.get("texts"):
        found["first"] = np.array(llm.tokenize(texts[0].encode(), add_bos=True)[:1], dtype=np.int64)
    llm.close()
    return found


if __name__ == "__main__":
    _main(*sys.argv[1:])
