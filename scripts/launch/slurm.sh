#!/usr/bin/env bash
# One training over the GPUs of several nodes under SLURM, from the repository's folder:
#   sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 8 scripts/launch/slurm.sh configs/base.yaml
#   sbatch ... scripts/launch/slurm.sh configs/1b.yaml training.parallel.sharding=full
# One task a GPU, started by srun itself: signals and exit statuses of train.py pass no launcher in between.
# Three minutes before the time is up, or when pre-empted, every task saves and leaves with the status that asks
# to come back (training/exit_codes.py); the job is then queued again under its number and goes on where it was.
# Repository, run folder and prepared text must lie on a disk that all nodes see. Prepare large text first.
#SBATCH --job-name=sextant
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@180
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export PYTHON="${PYTHON:-.venv/bin/python}"
# The first node is where the tasks meet; a port of the job's own, so that jobs on one node do not collide.
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"

# Not meant for fewer processes than were asked for: training.parallel.processes refuses to start with others.
srun --kill-on-bad-exit=1 bash scripts/launch/task.sh "$@" "training.parallel.processes=$SLURM_NTASKS"
status=$?
case "$status" in
    75 | 76 | 138 | 143) # saved and to come back; a task lost; or the signal came while Python was starting
        echo "status $status: queued again" >&2
        scontrol requeue "$SLURM_JOB_ID"
        ;;
esac
exit "$status"
