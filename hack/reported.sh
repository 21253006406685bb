#!/usr/bin/env bash
# Runs pytest with these arguments, and prints which folders ran with how many tests; fails where a test or the report does.
# Used by the scripts that run one folder of tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

report=$(mktemp -d)
trap 'rm -rf "$report"' EXIT
failed=0
.venv/bin/python -m pytest -q --junit-xml "$report/tests.xml" "$@" </dev/null || failed=$?
.venv/bin/python hack/what_ran.py "$report/tests.xml" || failed=1
exit "$failed"
