#!/usr/bin/env bash
# Runs every test that needs no Kubernetes and no GPU, and the linters, which are tests too (tests/lint).
# Usage: hack/test.sh [PYTEST ARGUMENTS]      for instance: hack/test.sh tests/core -k placement
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hack/env.sh dev

report=$(mktemp -d)
trap 'rm -rf "$report"' EXIT
failed=0
# Many tests wait: for processes, for deadlines, for real seconds. Three of them keep two processors busy.
.venv/bin/python -m pytest -q --numprocesses "${TEST_WORKERS:-3}" --dist worksteal --durations 20 \
  --junit-xml "$report/tests.xml" "$@" </dev/null || failed=$?
.venv/bin/python hack/what_ran.py "$report/tests.xml" || true
.venv/bin/python hack/modules.py || true
exit "$failed"
