#!/usr/bin/env bash
# Runs tests/browser: the web page in a headless Chromium. Where there is none, Debian's package is installed (as root), once.
# Usage: hack/browser.sh [PYTEST ARGUMENTS]      with WEB_SCREENSHOTS=FOLDER the pictures are kept there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

hack/env.sh dev
PYTHONPATH=tests .venv/bin/python -m support.chromium

exec hack/reported.sh --durations 5 tests/browser "$@"
