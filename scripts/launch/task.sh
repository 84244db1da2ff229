#!/usr/bin/env bash
# What srun starts in scripts/launch/slurm.sh, once a GPU: SLURM's names for a process as torch knows them.
set -euo pipefail
export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
# `8(x4)` or `8` or `8,4`: tasks on each node in the order of nodes.
LOCAL_WORLD_SIZE="$(echo "${SLURM_STEP_TASKS_PER_NODE:-$SLURM_NTASKS}" | tr ',' '\n' | awk -v node="${SLURM_NODEID:-0}" '
    { split($0, part, /[(x)]+/); times = part[2] ? part[2] : 1
      for (i = 0; i < times; i++) if (seen++ == node) print part[1] }')"
export LOCAL_WORLD_SIZE
exec "$PYTHON" train.py "$@"
