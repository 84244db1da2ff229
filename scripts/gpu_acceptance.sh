#!/usr/bin/env bash
# Checks this code on one NVIDIA GPU: correctness first, then speed, which is written to docs/benchmarks/gpu/<card>.md.
# About 40 minutes on an H100, an estimate.
#   bash scripts/gpu_acceptance.sh
#   bash scripts/gpu_acceptance.sh --rehearse     tiny models and one case of each test, on a CPU
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
failed=0
cases="train decode-1 decode-8 fixed-targets scheme-train"
if [ "${1:-}" = "--rehearse" ]; then
    echo "== correctness (tests/gpu_path/test_cuda.py on the CPU)" >&2
    python -m pytest -m "" tests/gpu_path/test_cuda.py || failed=1
    echo "== speed" >&2
    results="$(mktemp -d)"
    python scripts/benchmark.py --shapes tiny --cases $cases --schemes alibi --rounds 1 --repeats 1 \
        --results "$results" || failed=1
else
    # Without a GPU, the tests would be skipped.
    python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
        echo "error: torch in .venv finds no CUDA device; see nvidia-smi. For another build of torch, install it" \
            "into .venv, then set KEEP_ENVIRONMENT=1" >&2
        exit 1
    }
    echo "== correctness (tests marked gpu)" >&2
    python -m pytest -m gpu -rs -n 8 --dist worksteal || failed=1
    echo "== speed" >&2
    python scripts/benchmark.py --device cuda --shapes 125M --cases $cases --rounds 1 || failed=1
    python scripts/benchmark.py --device cuda --shapes 1.1B --cases train decode-1 --rounds 1 || failed=1
fi
[ "$failed" = 0 ] || { echo "error: a test or measurement failed; see above" >&2; exit 1; }
