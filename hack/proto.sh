#!/usr/bin/env bash
# Makes agent/mig_agent/pb/ from proto/ with the oldest supported tools, in an environment of its own that is thrown away.
# Usage: hack/proto.sh [--check]     --check: only say whether what is committed is fresh (1: it is not)
#
# The oldest tools, because generated code runs with the libraries of its own version and newer, never with older ones.
# pb/MADE-FROM keeps the checksums of the sources and the versions, so that the tests notice stale code with no tools at hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=(grpcio-tools==1.74.0 protobuf==6.31.1 mypy-protobuf==3.6.0 setuptools==80.9.0)
target=agent/mig_agent/pb
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install "${tools[@]}"

mapfile -t sources < <(cd proto && find . -name '*.proto' -printf '%P\n' | LC_ALL=C sort)
mkdir "$work/out"
PATH="$work/venv/bin:$PATH" "$work/venv/bin/python" -m grpc_tools.protoc --proto_path=proto \
  --python_out="$work/out" --grpc_python_out="$work/out" \
  --mypy_out=quiet:"$work/out" --mypy_grpc_out=quiet:"$work/out" \
  "${sources[@]}"

# protoc writes imports from the root of the sources; ours live inside the package.
find "$work/out" \( -name '*.py' -o -name '*.pyi' \) -print0 |
  xargs -0 sed -i -E \
    -e 's/^from ((migagent|kubelet)(\.[a-z0-9_]+)*) import /from mig_agent.pb.\1 import /' \
    -e 's/^import ((migagent|kubelet)(\.[a-z0-9_]+)+)$/import mig_agent.pb.\1/' \
    -e 's/([^A-Za-z0-9_./"])((migagent|kubelet)(\.[a-z0-9_]+)*\.v[0-9a-z]+\.[a-z0-9_]+_pb2)/\1mig_agent.pb.\2/g'
find "$work/out" -mindepth 1 -type d -exec touch {}/__init__.py \;
cat >"$work/out/__init__.py" <<'PY'
"""Generated from `proto/` by `hack/proto.sh`; never edited by hand."""
PY
{
  printf '%s\n' "${tools[@]}"
  (cd proto && sha256sum "${sources[@]}")
} >"$work/out/MADE-FROM"

if [ "${1:-}" = --check ]; then
  if ! diff -r --exclude=__pycache__ "$target" "$work/out"; then
    echo "cannot call agent/mig_agent/pb/ fresh: it differs from what proto/ gives; run hack/proto.sh" >&2
    exit 1
  fi
  exit 0
fi
rm -rf "$target"
cp -r "$work/out" "$target"
echo "made $target from ${sources[*]}"
