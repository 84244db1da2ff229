#!/usr/bin/env bash
# Started by srun in scripts/launch/slurm.sh, once per GPU. Translates SLURM's variables to those of torch.distributed.
set -euo pipefail
export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
# SLURM_STEP_TASKS_PER_NODE lists the tasks of each node: `8(x4)`, `8` or `8,4`.
LOCAL_WORLD_SIZE="$(echo "${SLURM_STEP_TASKS_PER_NODE:-$SLURM_NTASKS}" | tr ',' '\n' | awk -v node="${SLURM_NODEID:-0}" '
    { split($0, part, /[(x)]+/); times = part[2] ? part[2] : 1
      for (i = 0; i < times; i++) if (seen++ == node) print part[1] }')"
export LOCAL_WORLD_SIZE
exec "$PYTHON" train.py "$@"
