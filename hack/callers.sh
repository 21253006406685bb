#!/usr/bin/env bash
# Runs tests/callers: callers in other languages than Python, with stubs generated from proto/, against a running agent.
# Needs Go. The first run builds gRPC (a minute or two on two cores); later ones take what Go keeps outside the checkout.
# Usage: hack/callers.sh [PYTEST ARGUMENTS]      for instance: hack/callers.sh -k tcp
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v go >/dev/null; then
  echo "cannot test callers in Go: there is no \`go\` on the PATH; install Go (https://go.dev/dl), then run this again" >&2
  exit 1
fi
hack/env.sh dev

exec hack/reported.sh --durations 5 tests/callers "$@"
