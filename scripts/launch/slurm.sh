#!/usr/bin/env bash
# Trains on several nodes under SLURM. Run from the root of the repository:
#   sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 8 scripts/launch/slurm.sh configs/base.yaml
#   sbatch ... scripts/launch/slurm.sh configs/1b.yaml training.parallel.sharding=full
# srun starts one task per GPU, so signals and exit statuses of train.py reach SLURM directly. Three minutes before the
# time limit, or on preemption, every task saves a checkpoint and exits with status 75 (errors.py); the job is
# requeued under its number and resumes. The repository, run directory and prepared text must be on a disk that all
# nodes share. Prepare large texts first.
#SBATCH --job-name=sextant
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@180
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export PYTHON="${PYTHON:-.venv/bin/python}"
# The rendezvous is the first node; each job has its own port, so that jobs on one node do not collide.
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"

# training.parallel.processes stops the run if fewer processes start than requested.
srun --kill-on-bad-exit=1 bash scripts/launch/slurm_task.sh "$@" "training.parallel.processes=$SLURM_NTASKS"
status=$?
case "$status" in
    75 | 76 | 138 | 143) # checkpoint saved; a task was lost; or the signal arrived while Python was starting
        echo "status $status: requeueing" >&2
        scontrol requeue "$SLURM_JOB_ID"
        ;;
esac
exit "$status"
