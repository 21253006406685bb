#!/usr/bin/env bash
# The budgets of the agent against their baselines. Usage: hack/bench/run.sh [plan|pair|crowd|...]... [-o json]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
hack/env.sh dev
exec .venv/bin/python hack/bench/budgets.py "$@"
