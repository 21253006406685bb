#!/usr/bin/env bash
# Shows the agent's main job over simulated GPUs. Needs python3 (3.11 or newer) with its venv module, and nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hack/env.sh run
exec .venv/bin/mig-agent demo "$@"
