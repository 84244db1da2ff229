#!/usr/bin/env bash
# Runs the tests under the lowest supported versions (constraints-lowest.txt), in .venv-lowest.
#   bash scripts/test_lowest.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv-lowest/bin/python ] || "${PYTHON:-python3}" -m venv .venv-lowest
.venv-lowest/bin/python -m pip install --quiet -c constraints-lowest.txt -e ".[test]"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
export PATH="$PWD/.venv-lowest/bin:$PATH" VIRTUAL_ENV="$PWD/.venv-lowest"
exec python -m pytest -n auto --maxprocesses 8 --dist worksteal "$@"
