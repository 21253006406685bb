#!/usr/bin/env bash
# Calls that end at any moment before their client has confirmed the lease, and requests with short waits on a full node:
# does no lease stay that nobody has, is every call answered? Some minutes; a small one is among the tests.
# Usage: hack/delivery.sh [--leaving N] [--waiting N] [--migctl N] [-o json]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hack/env.sh dev
exec .venv/bin/python hack/bench/delivery.py "$@"
