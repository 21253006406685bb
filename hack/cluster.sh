#!/usr/bin/env bash
# A real Kubernetes of one node or more on this machine, for a person to play with. Needs root; builds what is missing (minutes, once).
# Usage: hack/cluster.sh [--name NAME | --dir FOLDER] [--node NODE] up|down|kubectl|helm|exec|net|logs|stop|kill|start|status ...
# (--help tells more)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "$(id -u)" -ne 0 ] && [[ " $* " != *" --help "* && " $* " != *" -h "* ]]; then
  echo "cannot work on a cluster: that needs root, for namespaces, mounts and cgroups; try: sudo hack/cluster.sh $*" >&2
  exit 1
fi
"$root/hack/env.sh" dev
PYTHONPATH="$root/tests" exec "$root/.venv/bin/python" -m support.cluster "$@"
