#!/usr/bin/env bash
# Runs tests/e2e: the agent as pods see it, on real clusters that are made for the run and taken away after it.
# Needs root and a machine on which namespaces, mounts and cgroups can be made. What is missing is installed (Debian's packages)
# and built (Kubernetes, containerd, helm, the agent's image) first, once: minutes; see tests/e2e/modules/build.sh for the cache.
# Usage: hack/e2e.sh [PYTEST ARGUMENTS]      for instance: hack/e2e.sh -k collide
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$(id -u)" -ne 0 ]; then
  echo "cannot run the tests on a real cluster: that needs root, for namespaces, mounts and cgroups; try sudo" >&2
  exit 1
fi
if ! told=$(unshare --pid --mount --net --uts --ipc --mount-proc --fork mount -t tmpfs tmpfs /mnt 2>&1); then
  echo "cannot run the tests on a real cluster: this machine allows no namespaces of one's own ($told)" >&2
  exit 1
fi
hack/env.sh dev
# Before the tests, whose patience is for tests.
PYTHONPATH=tests .venv/bin/python -m support.cluster prepare

# Three processes with a cluster each (tests/e2e/conftest.py): all wait most of the time.
exec hack/reported.sh --numprocesses "${E2E_WORKERS:-3}" --dist loadscope --durations 20 tests/e2e "$@"
