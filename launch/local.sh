#!/usr/bin/env bash
# Trains on this machine with torchrun itself: launch/local.sh [KEY=VALUE ...]
#
# `pipetrain train` does the same and sums up exit codes and messages; this is the line to start from
# where torchrun needs options of its own. RANKS=4 launch/local.sh pipeline.num_stages=4
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
RANKS=${RANKS:-2} # pipeline.num_stages / pipeline.stages_per_rank

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32} # 1 would make streams wait for each other

exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$RANKS" --max-restarts=0 \
  -m pipetrain.train "$@"
