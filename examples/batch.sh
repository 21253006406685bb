#!/usr/bin/env bash
# A batch script that takes a piece of a GPU, uses it for several commands, and gives it back however it ends.
# Usage: examples/batch.sh [MEMORY]
set -euo pipefail

# When the request fails, why is on standard error, and the script ends here: `set -e` sees its exit code.
lease=$(migctl request --gpu-memory "${1:-4G}" --wait 30s -o env)
eval "$lease"
trap 'migctl release "$MIG_AGENT_LEASE"' EXIT

echo "preparing on $CUDA_VISIBLE_DEVICES"
echo "training on $CUDA_VISIBLE_DEVICES"
