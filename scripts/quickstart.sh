#!/usr/bin/env bash
# Installs the pinned dependencies into .venv, prepares the source code of Python's standard library, trains a small model at
# 256 tokens, evaluates it at 256 to 4,096 tokens with six methods and generates text. Steps that are already done are
# skipped when it runs again.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
step() { echo; echo "== $1  ($((SECONDS - started)) s since the start)"; }

step "1/5 environment"
. scripts/environment.sh ""
run=runs/quickstart

step "2/5 text: source code of Python's standard library"
python scripts/prepare.py configs/quickstart.yaml
step "3/5 training at 256 tokens: about 4 minutes on 2 cores"
python train.py configs/quickstart.yaml --run-dir "$run"
step "4/5 evaluation at 256 to 4096 tokens: about 2 minutes on 2 cores"
python evaluate.py "$run" configs/evaluation/quickstart.yaml
step "5/5 text from the trained model"
python generate.py "$run" --prompt "def read_lines(path):" --tokens 300 --temperature 0.7 --top-p 0.95 --seed 1

step "done"
echo "figure:   $run/evaluation/quickstart/nll_by_length.png"
echo "numbers:  $run/evaluation/quickstart/results.csv"
