#!/usr/bin/env bash
# How long pods take to run on a real one-node Kubernetes over simulated GPUs, with and without a MIG device. Needs root.
# Usage: hack/bench/pods.sh [--rounds N] [-o json]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"$root/hack/env.sh" dev
PYTHONPATH="$root/tests" exec "$root/.venv/bin/python" "$root/hack/bench/pods.py" "$@"
