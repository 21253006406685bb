#!/usr/bin/env bash
# One scheduler over a thousand simulated agents: decisions in a second, and what it costs to watch them all. Takes a minute or two.
# Usage: hack/bench/scale.sh [--agents N] [-o json]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"$root/hack/env.sh" dev
exec "$root/.venv/bin/python" "$root/hack/bench/scale.py" "$@"
