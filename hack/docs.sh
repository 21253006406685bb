#!/usr/bin/env bash
# Makes the documents that come from the program itself: settings, example configuration, pictures.
# Usage: hack/docs.sh [--check]      "--check": change nothing, and fail where something is not fresh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hack/env.sh dev
exec .venv/bin/python hack/generate.py "$@"
