#!/usr/bin/env bash
# A million acquire/release pairs on an agent over simulated GPUs: does its memory stay flat, does nothing leak?
# Usage: hack/soak.sh [--pairs N] [--seconds S] [--restart-every N] [--kill-client-every N] [--trouble-every N] ...    hack/soak.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hack/env.sh dev
exec .venv/bin/python hack/bench/soak.py "$@"
