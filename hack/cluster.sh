#!/usr/bin/env bash
# A real one-node Kubernetes on this machine, for a person to play with. Needs root; builds what is missing (minutes, once).
# Usage: hack/cluster.sh [--name NAME | --dir FOLDER] up|down|kubectl|helm|exec|logs|stop|kill|start|status ...      (--help tells more)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/hack/env.sh" dev
PYTHONPATH="$root/tests" exec "$root/.venv/bin/python" -m support.cluster "$@"
