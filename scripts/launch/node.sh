#!/usr/bin/env bash
# One training over several machines without a batch system: the same line on each, N from 0 on, all at once.
#   bash scripts/launch/node.sh --node N --nodes 4 --gpus 8 --host first-machine -- configs/base.yaml
# or from one machine that reaches the others:
#   n=0; for host in a b c d; do ssh $host "cd $PWD && bash scripts/launch/node.sh --node $n --nodes 4 --gpus 8 \
#       --host a -- configs/base.yaml" & n=$((n+1)); done; wait
# HOST is the machine of node 0. --gpus is the number of processes on each machine; on CPUs too. --sharded splits
# the model over all of them (FSDP2). Repository, run folder and prepared text must lie on a disk that all see.
set -euo pipefail
cd "$(dirname "$0")/../.."
port=29500 config=many_nodes node="" nodes="" gpus="" host=""
while [ $# -gt 0 ]; do
    case "$1" in
        --node) node="$2"; shift ;;
        --nodes) nodes="$2"; shift ;;
        --gpus) gpus="$2"; shift ;;
        --host) host="$2"; shift ;;
        --port) port="$2"; shift ;;
        --sharded) config=many_nodes_fsdp ;;
        --) shift; break ;;
        *) echo "error: $1 is not an option of $0; settings of the run come after --" >&2; exit 2 ;;
    esac
    shift
done
if [ -z "$node" ] || [ -z "$nodes" ] || [ -z "$gpus" ] || [ -z "$host" ]; then
    echo "error: --node, --nodes, --gpus and --host must be given; see the head of $0" >&2
    exit 2
fi
processes=$((nodes * gpus))
exec "${PYTHON:-.venv/bin/python}" -m accelerate.commands.launch --config_file "configs/accelerate/$config.yaml" \
    --num_machines "$nodes" --num_processes "$processes" --machine_rank "$node" \
    --main_process_ip "$host" --main_process_port "$port" \
    train.py "$@" "training.parallel.processes=$processes"
