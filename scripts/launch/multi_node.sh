#!/usr/bin/env bash
# Trains on several machines without a batch system. Run on every machine at the same time, with N = 0, 1, 2, ...:
#   bash scripts/launch/multi_node.sh --node N --nodes 4 --gpus 8 --host first-machine -- configs/base.yaml
# or from one machine with ssh access to the others:
#   n=0; for host in a b c d; do ssh $host "cd $PWD && bash scripts/launch/multi_node.sh --node $n --nodes 4 --gpus 8 \
#       --host a -- configs/base.yaml" & n=$((n+1)); done; wait
# --host names the machine with N = 0. --gpus is the number of processes per machine, also on CPUs. --sharded shards the
# model over all processes (FSDP2). The repository, run directory and prepared text must be on a disk that all machines share.
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
        *) echo "error: unknown option $1; settings of the run come after --" >&2; exit 2 ;;
    esac
    shift
done
if [ -z "$node" ] || [ -z "$nodes" ] || [ -z "$gpus" ] || [ -z "$host" ]; then
    echo "error: --node, --nodes, --gpus and --host are required; see the comments in $0" >&2
    exit 2
fi
processes=$((nodes * gpus))
exec "${PYTHON:-.venv/bin/python}" -m accelerate.commands.launch --config_file "configs/accelerate/$config.yaml" \
    --num_machines "$nodes" --num_processes "$processes" --machine_rank "$node" \
    --main_process_ip "$host" --main_process_port "$port" \
    train.py "$@" "training.parallel.processes=$processes"
