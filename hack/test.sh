#!/usr/bin/env bash
# Runs every test that needs no Kubernetes and no GPU, and the linters, which are tests too (tests/lint).
# Usage: hack/test.sh [PYTEST ARGUMENTS]      for instance: hack/test.sh tests/core -k placement
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hack/env.sh dev

# In memory where there is plenty: each of thousands of ledgers waits for the disk at every commit.
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] &&
  findmnt --noheadings --types tmpfs --output OPTIONS --mountpoint /dev/shm 2>/dev/null | grep -qvE 'noexec|nodev' &&
  [ "$(df --output=avail --block-size=1G /dev/shm | tail -n 1)" -ge 8 ] &&
  [ "$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)" -ge 8 ]; then
  export TMPDIR=/dev/shm
fi
own=$(mktemp -d "${TMPDIR:-/tmp}/t.XXXX") # short, as paths of sockets are
trap 'rm -rf "$own"' EXIT
chmod 1777 "$own" # tests have other users, too
export TMPDIR=$own
report=$own/tests.xml
failed=0
# Many tests wait: for processes, for deadlines, for real seconds. Three of them keep two processors busy.
.venv/bin/python -m pytest -q --numprocesses "${TEST_WORKERS:-3}" --dist worksteal --durations 20 \
  --basetemp "$own/p" --junit-xml "$report" "$@" </dev/null || failed=$?
.venv/bin/python hack/what_ran.py "$report" || true
.venv/bin/python hack/modules.py || true
exit "$failed"
