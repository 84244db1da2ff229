"""Inductor lowers FlexAttention of each scheme for CUDA, and an H100 can launch the kernels.

Needs g++ and triton, which no CPU build of torch brings: `scripts/test.sh --slow` installs it (200
MB).
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_path.common import needs_patched_torch
from tests.gpu_path.fake_gpu import ROOT

SHARED_MEMORY = 232_448  # bytes that a block of an H100 may use
tools = {"g++": shutil.which("g++"), "triton": importlib.util.find_spec("triton")}
missing = [name for name, found in tools.items() if found is None]
pytestmark = [
    pytest.mark.slow,
    needs_patched_torch,
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}"),
]

# One case of each mask and bias function.
CASES = [
    "alibi:plain",
    "alibi-learned:plain",
    "alibi-auto:ragged",
    "t5:plain",
    "kerple:plain",
    "kerple-power:packed",
    "kerple-log3:plain",
    "sandwich:plain",
    "fire:plain",
    "fox:packed",
    "shaw:packed",
    "rope:packed",
    "rope-window:plain",
    "rope-sinks:plain",
    "none-ssmax:plain",
    "pope:packed",
    "carope:packed",
    "rope-rerope:plain",
    "rope-self-extend:plain",
    "rope-dual-chunk:plain",
    "rope-lambda:plain",
    "rope-streaming:plain",
]
# Their biases get gradients in a pass of their own.
DETERMINISTIC = {
    "alibi-learned:plain",
    "t5:plain",
    "kerple:plain",
    "kerple-power:packed",
    "kerple-log3:plain",
    "fire:plain",
}
# Of pairs, they compute with no int64 numbers, which take two registers each.
IN_32_BITS = {"alibi:plain", "t5:plain", "fire:plain", "fox:packed", "rope-sinks:plain"}


@pytest.fixture(scope="module")
def guard(tmp_path_factory) -> Path:
    """`cuda_guard.cpp` as a shared library."""
    torch_folder = Path(torch.__file__).parent
    includes = [
        f"-I{torch_folder / 'include'}",
        f"-I{torch_folder / 'include/torch/csrc/api/include'}",
    ]
    made = tmp_path_factory.mktemp("guard") / "cuda_guard.so"
    source = Path(__file__).with_name("cuda_guard.cpp")
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *includes, str(source)]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, *libraries, "-o", str(made)], check=True, timeout=300)
    return made


def lowered(tmp_path: Path, guard: Path, *words: str) -> dict:
    """The line that `tests.gpu_path.lowering` prints for one case."""
    command = [sys.executable, "-m", "tests.gpu_path.lowering", str(guard), *words]
    caches = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code"),
    }
    run = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
        env={**os.environ, **caches},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(1800)
def test_flex_kernels_fit_an_h100(case, guard, tmp_path):
    found = lowered(tmp_path, guard, "--machine-code", case)["kernels"]
    assert {kernel["kind"] for kernel in found} == {"forward", "backward"}
    assert all(0 < kernel["shared"] <= SHARED_MEMORY for kernel in found), found
    if case in IN_32_BITS:
        assert not any(kernel["int64"] for kernel in found), found
    if case in DETERMINISTIC:
        assert not any(kernel["atomics"] for kernel in found), found


def test_loss_stores_logits_in_the_dtype_of_products(guard, tmp_path):
    """Logits and their gradients: what stores them in float32 reads and writes twice the bytes."""
    assert lowered(tmp_path, guard, "loss")["logits"] == ["bfloat16", "bfloat16"]
