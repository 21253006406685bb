#!/usr/bin/env bash
# Runs tests/machine: the Debian package on a small Debian machine with a real systemd, booted for the tests.
# Needs root and a machine on which namespaces and mounts can be made; what is missing (Debian's packages) is installed, and the
# machine's image is built (a minute) first, once.
# Usage: hack/machine.sh [PYTEST ARGUMENTS]      for instance: hack/machine.sh -k purge
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

hack/env.sh dev
# Before the tests, whose patience is for tests.
PYTHONPATH=tests .venv/bin/python -m support.machine

exec hack/reported.sh --durations 10 tests/machine "$@"
