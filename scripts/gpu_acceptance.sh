#!/usr/bin/env bash
# Checks this code on one NVIDIA GPU in at most ten minutes: the tests for GPUs, then speed, which is written to
# docs/benchmarks/gpu/<card>.md.
#   bash scripts/gpu_acceptance.sh                on the GPU
#   bash scripts/gpu_acceptance.sh --rehearse     tiny models and one case of each test, on a CPU
# If there is a folder wheels/ in the clone (docs/benchmarks/gpu/README.md says how to fill it), no network is needed:
# .venv uses the packages of python3 (PYTHON=... for another one), torch among them, and those that it lacks come from
# wheels/. With KEEP_ENVIRONMENT=1, .venv is used as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
if [ -d wheels ] && [ "${KEEP_ENVIRONMENT:-}" != 1 ]; then
    [ -x .venv/bin/python ] || "$python" -m venv --without-pip .venv
    # Makes the packages of $python importable, which may be in a virtual environment too.
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
        > "$(echo .venv/lib/python3*/site-packages)/machine.pth"
    "$python" -m pip --python .venv/bin/python install --quiet --no-index --find-links wheels 'torch>=2.11' accelerate \
        filelock hypothesis matplotlib pandas psutil pyarrow 'pydantic>=2.12.5' pytest pytest-timeout pytest-xdist pyyaml \
        rich safetensors scipy sentencepiece 'tokenizers>=0.22.1' ||
        { echo "error: wheels/ lacks a package; see docs/benchmarks/gpu/README.md" >&2; exit 1; }
    export KEEP_ENVIRONMENT=1
fi
. scripts/environment.sh test
exec python scripts/gpu_acceptance.py --seconds $((590 - SECONDS)) "$@"
