#!/usr/bin/env bash
# Checks this code on one NVIDIA GPU: correctness first, then speed, which is written beside its goals to
# docs/benchmarks/gpu/<card>.md. Aims at less than 20 minutes on an H100.
#   bash scripts/gpu_acceptance.sh
#   bash scripts/gpu_acceptance.sh --rehearse     tiny models on a CPU; the tests marked gpu are skipped
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
failed=0
echo "== correctness (tests marked gpu)" >&2
python -m pytest -m gpu -rs || failed=1
echo "== speed" >&2
if [ "${1:-}" = "--rehearse" ]; then
    results="$(mktemp -d)"
    python scripts/checks/gpu_speed.py --rehearse --results "$results" || failed=1
else
    python scripts/checks/gpu_speed.py || failed=1
fi
[ "$failed" = 0 ] || { echo "error: a test or measurement failed; see above" >&2; exit 1; }
