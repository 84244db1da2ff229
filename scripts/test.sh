#!/usr/bin/env bash
# Runs ruff and the tests in .venv on all cores (at most 8), and creates .venv if necessary.
#   bash scripts/test.sh                    all tests that are not marked slow
#   bash scripts/test.sh --slow             all tests, with the reasons of those that are skipped
#   bash scripts/test.sh tests/model -x     any arguments of pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
arguments=()
for argument in "$@"; do
    if [ "$argument" != "--slow" ]; then arguments+=("$argument"); continue; fi
    arguments+=(-m "" -rs)
    # Lowers kernels for GPUs; CPU builds of torch come without it. If it is missing, these tests are skipped.
    if [ "${KEEP_ENVIRONMENT:-}" != 1 ] && ! python -c "import triton" 2>/dev/null; then
        python -m pip install --quiet --disable-pip-version-check triton==3.7.1 || true
    fi
done
echo "== ruff" >&2
ruff check .
ruff format --check --quiet . || { echo "error: run 'ruff format .'" >&2; exit 1; }
echo "== pytest" >&2
# One thread per process. bash 3.2 treats an empty array as unset, hence ${arguments[@]+...}.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# worksteal: each process runs a contiguous part of the tests, which share fixtures, then takes over others.
exec python -m pytest -n auto --maxprocesses 8 --dist worksteal ${arguments[@]+"${arguments[@]}"}
