#!/usr/bin/env bash
# Trains on this machine with torchrun itself: launch/local.sh [KEY=VALUE ...]
#
# `pipetrain train` does the same and sums up exit codes and messages; this is the line to start from
# where torchrun needs options of its own. RANKS=4 launch/local.sh pipeline.num_stages=4
set -euo pipefail
LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$LAUNCH/.."

PYTHON=${PYTHON:-.venv/bin/python}
# torchrun's --standalone would execute what other users of the machine write into its store.
RANKS=${RANKS:-2} # pipeline.num_stages / pipeline.stages_per_rank
# shellcheck source=launch/env.sh
source "$LAUNCH/env.sh"

exec "$PYTHON" -m torch.distributed.run --master-port="${PORT:-29500}" --nproc-per-node="$RANKS" --max-restarts=0 \
  -m pipetrain.train "$@"
