#!/usr/bin/env bash
# Trains on several machines with torchrun itself. Type the same line on each of them, in any order:
#
#   NODES=2 RANKS_PER_NODE=2 RENDEZVOUS=node1:29500 launch/multinode.sh pipeline.num_stages=4 run_dir=/shared/runs/mine resume=auto
#
#   NODES           machines; 1:2 goes on with one of two when the other is gone (MAX_RESTARTS, parallel.num_replicas=auto, resume=auto)
#   RANKS_PER_NODE  ranks on each: its GPUs, or as many as it has cores for
#   RENDEZVOUS      HOST:PORT where they meet: the name of one of them, which all can reach, and a port that is free there
#   INTERFACE       network device between them, such as ib0, where it is not the one of the machine's name
#   MAX_RESTARTS    how often torchrun starts all ranks again when one fails (default 0); takes resume=auto
#   WAIT_SECONDS    how long a machine waits for the others (default 600)
#
# The machines share a key: PIPETRAIN_RENDEZVOUS_KEY, or a file of mode 0600 (docs/OPERATIONS.md, Safety).
# run_dir has to lie on a file system that all machines see. A whole cluster with a queue: launch/slurm.sbatch.
set -euo pipefail
LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

: "${NODES:?set NODES to the number of machines}"
: "${RANKS_PER_NODE:?set RANKS_PER_NODE to the ranks of one machine}"
: "${RENDEZVOUS:?set RENDEZVOUS to HOST:PORT of one of the machines}"
PYTHON=${PYTHON:-python3}
WAIT_SECONDS=${WAIT_SECONDS:-600}
# shellcheck source=launch/env.sh
source "$LAUNCH/env.sh"

# After a restart ranks must not find the addresses of those that are dead: a new store each time.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun passes the listed signals on, so that SIGUSR1 to it saves and stops as Ctrl-C does.
exec "$PYTHON" -m pipetrain.launcher.signed \
  --nnodes="$NODES" --nproc-per-node="$RANKS_PER_NODE" \
  --rdzv-backend=pipetrain --rdzv-endpoint="$RENDEZVOUS" --rdzv-id=pipetrain \
  --rdzv-conf="join_timeout=$WAIT_SECONDS,read_timeout=$WAIT_SECONDS" \
  --max-restarts="${MAX_RESTARTS:-0}" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m pipetrain.train "$@"
