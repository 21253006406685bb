#!/usr/bin/env bash
# Runs tests/browser: the web page in a headless Chromium. Where there is none, Debian's package is installed (as root), once.
# Usage: hack/browser.sh [PYTEST ARGUMENTS]      with WEB_SCREENSHOTS=FOLDER the pictures are kept there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

hack/env.sh dev
PYTHONPATH=tests .venv/bin/python -m support.chromium

report=$(mktemp -d)
trap 'rm -rf "$report"' EXIT
failed=0
.venv/bin/python -m pytest -q --durations 5 --junit-xml "$report/tests.xml" tests/browser "$@" </dev/null || failed=$?
.venv/bin/python hack/what_ran.py "$report/tests.xml" || failed=1
exit "$failed"
