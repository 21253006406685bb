#!/usr/bin/env bash
# A batch script that takes a piece of a GPU, uses it for several commands, and gives it back however it ends.
# Usage: examples/batch.sh [MEMORY]
set -euo pipefail

# Nothing is printed, and so nothing is set, when the request fails; the words are on standard error.
lease=$(migctl request --gpu-memory "${1:-4G}" --wait 30s -o env)
eval "$lease"
trap 'migctl release "$MIG_AGENT_LEASE"' EXIT

echo "preparing on $CUDA_VISIBLE_DEVICES"
echo "training on $CUDA_VISIBLE_DEVICES"
