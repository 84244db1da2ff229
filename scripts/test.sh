#!/usr/bin/env bash
# Runs the tests, in .venv, made first if need be, on all cores (at most 8). About eight minutes on 2 of them.
#   bash scripts/test.sh                    everything but what is marked slow
#   bash scripts/test.sh --slow             everything
#   bash scripts/test.sh tests/model -x     any words for pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
words=()
for word in "$@"; do
    if [ "$word" = "--slow" ]; then words+=(-m ""); else words+=("$word"); fi
done
echo "== ruff" >&2
ruff check .
ruff format --check --quiet . || { echo "error: run 'ruff format .'" >&2; exit 1; }
echo "== pytest" >&2
# One thread for each of the processes; bash 3.2 calls an empty array unset.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m pytest -n auto --maxprocesses 8 ${words[@]+"${words[@]}"}
