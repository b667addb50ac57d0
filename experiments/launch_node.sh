#!/usr/bin/env bash
# Runs a program of experiments/ on the GPUs of this node.
#
#   experiments/launch_node.sh train --out=runs/mine ...                  one process for all GPUs of the node
#   PROCESSES=8 experiments/launch_node.sh train --out=runs/mine ...      a process per GPU (or another number that divides them)
#   NODES=2 NODE_RANK=0 COORDINATOR=10.0.0.1:29400 PROCESSES=8 ...        the same command on each node, NODE_RANK 0 on COORDINATOR's
#
# Only train runs in several processes; evaluate and generate use the GPUs of one. All nodes must see the same files, and --out must be in
# a folder that they share. CUDA_VISIBLE_DEVICES limits the node's GPUs. When a process fails the others are ended and the exit status is
# that of the failure; SIGTERM and Ctrl-C reach all processes, so that training saves. PYTHON names the interpreter (default: python3).
set -euo pipefail

die() {
    echo "error: $*" >&2
    exit 1
}

[[ $# -gt 0 ]] || die "usage: [PROCESSES=N] [NODES=N NODE_RANK=R COORDINATOR=HOST:PORT] $0 train|evaluate|generate FLAGS"
program=$1
shift
processes=${PROCESSES:-1} nodes=${NODES:-1} rank=${NODE_RANK:-0} python=${PYTHON:-python3}
for name in processes nodes rank; do
    [[ ${!name} =~ ^[0-9]{1,4}$ ]] || die "${name^^}=${!name}: a whole number is needed"
    printf -v "$name" %d "$((10#${!name}))"
done
((processes >= 1)) || die "PROCESSES=$processes: at least 1 is needed"
((nodes >= 1)) || die "NODES=$nodes: at least 1 is needed"
((rank < nodes)) || die "NODE_RANK=$rank: accepted are 0 to $((nodes - 1)), since NODES=$nodes"
total=$((processes * nodes))
[[ $total == 1 || $program == train ]] || die "$program runs in one process and uses all GPUs of the node: PROCESSES and NODES are for train"
[[ $nodes == 1 || -n ${COORDINATOR:-} ]] || die "COORDINATOR is not set: NODES=$nodes needs the host of NODE_RANK 0 and a free port there, HOST:PORT"

# NCCL's own words where it fails, instead of XLA's one line. It finds NVLink and InfiniBand by itself, and a step has one all-reduce of a few
# megabytes at its end, so there is nothing for XLA's flags to overlap. In a container several processes need shared memory (--ipc=host).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

if ((total == 1)); then
    exec "$python" -m "experiments.$program" "$@"
fi

if [[ ${JAX_PLATFORMS:-} == cpu ]]; then
    count=0
elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
    count=${#gpus[@]}
elif command -v nvidia-smi >/dev/null; then
    count=$(nvidia-smi --list-gpus | grep -c '^GPU') || count=0
else
    count=0 # a CPU, where every process has devices of its own
fi
((count % processes == 0)) || die "PROCESSES=$processes does not divide the $count GPUs of this node"

# A port that is free now; nodes must agree on one, so there it is given.
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
export JAX_COORDINATOR_ADDRESS=${COORDINATOR:-127.0.0.1:$("$python" -c "$free_port")}
export JAX_NUM_PROCESSES=$total
# Several processes tokenise at once.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

running=()
stop() { kill -s "$1" "${running[@]}" 2>/dev/null || true; }
# Passed on as SIGTERM once all processes are there. A terminal sends Ctrl-C to all of them.
stopping=
trap 'stopping=yes' TERM INT
# Nothing that was started outlives this script, whatever ends it.
trap 'stop TERM' EXIT
# Waits without a process of its own, which a terminal's Ctrl-C would end: nothing ever comes from this pipe.
exec {silence}<> <(:)
pause() { read -rt "$1" -u "$silence" _ || true; }

for ((i = 0; i < processes; i++)); do
    if ((count > 0)); then
        share=$((count / processes))
        # Places in CUDA_VISIBLE_DEVICES, which stays as it is. JAX takes memory on these GPUs alone, so its share needs no change.
        JAX_LOCAL_DEVICE_IDS=$((i * share))
        for ((j = i * share + 1; j < (i + 1) * share; j++)); do JAX_LOCAL_DEVICE_IDS+=,$j; done
        export JAX_LOCAL_DEVICE_IDS
    fi
    JAX_PROCESS_ID=$((rank * processes + i)) "$python" -m "experiments.$program" --distributed "$@" &
    running+=($!)
done

# `wait -n` forgets a process that a signal ended while the shell did something else, so who is still there is asked for.
status=0
while ((${#running[@]})); do
    if [[ $stopping ]]; then
        stopping=
        stop TERM
    fi
    pause 0.2
    left=()
    for process in "${running[@]}"; do
        if kill -0 "$process" 2>/dev/null; then
            left+=("$process")
            continue
        fi
        code=0
        wait "$process" || code=$?
        ((code == 0 || status != 0)) || status=$code
    done
    running=("${left[@]}")
    if ((status != 0 && ${#running[@]})); then
        echo "error: a process ended with status $status: ending the other ${#running[@]}" >&2
        # Their collectives wait for one that is gone, so they cannot end by themselves.
        pause 2
        stop KILL
        wait "${running[@]}" || true
        running=()
    fi
done
exit "$status"
