#!/usr/bin/env bash
# Runs tests/elastic with PyTorch (Debian's package, installed as root where it is not there), Keras 3 on JAX (from PyPI, in
# an environment of its own: .venv-keras), and 200 random events in one training. A minute where all is installed.
# Usage: hack/elastic.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
hack/env.sh dev

if ! /usr/bin/python3 -c 'import torch' 2>/dev/null; then
  apt-get install --yes --no-install-recommends python3-torch
fi
if ! .venv-keras/bin/python -c 'import keras, jax' 2>/dev/null; then
  .venv/bin/python -m venv .venv-keras
  .venv-keras/bin/pip install --quiet 'keras>=3.8,<4' 'jax>=0.4.34,<1' numpy
fi
export ELASTIC_KERAS_PYTHON=$PWD/.venv-keras/bin/python ELASTIC_EVENTS="${ELASTIC_EVENTS:-200}"

exec hack/reported.sh --durations 5 tests/elastic "$@"
