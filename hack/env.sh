#!/usr/bin/env bash
# Makes .venv in the checkout, with the package and its development tools, and does nothing where it stands already.
# Usage: hack/env.sh [run|dev]      "run": only what the agent needs; "dev" (default): the tests and linters too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-dev}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "cannot set up the environment: $python is not Python 3.11 or newer; name another with PYTHON=..." >&2
  exit 1
fi

if [ -L .venv ]; then
  echo "cannot set up the environment: .venv is a link, and what it leads to may be another checkout's; remove it" >&2
  exit 1
fi

# A .venv that was moved here or lost its interpreter is made again rather than mended.
if ! .venv/bin/python -c '' 2>/dev/null || [ "$(cat .venv/.made-in 2>/dev/null)" != "$PWD" ]; then
  echo "setting up .venv (once) ..." >&2
  if ! "$python" -m venv --clear .venv; then
    echo "cannot set up the environment: $python has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
  fi
  echo "$PWD" >.venv/.made-in
fi

# The development tools stand on what the agent needs, so "dev" serves for "run" too.
for made in "$what" dev; do
  stamp=".venv/.made-for-$made"
  if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ]; then
    exit 0
  fi
done

extra=""
[ "$what" = dev ] && extra="[dev]"
echo "installing what mig-agent needs$([ "$what" = dev ] && echo ", and its tests,") into .venv (once) ..." >&2
for try in 1 2 3; do
  if .venv/bin/python -m pip --quiet --disable-pip-version-check --no-input install --editable ".$extra"; then
    touch ".venv/.made-for-$what"
    exit 0
  fi
  echo "installing failed (try $try of 3)" >&2
  sleep "$((try * 2))"
done
echo "cannot set up the environment: pip could not install the packages; its words are above" >&2
exit 1
