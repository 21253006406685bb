#!/usr/bin/env bash
# Builds the kube-scheduler with the plugin: the stubs out of proto/, then the program over them.
# Needs Go 1.26 or newer, protoc (or what PROTOC says), protoc-gen-go and protoc-gen-go-grpc. Minutes, the first time.
# Usage: build.sh FOLDER     writes FOLDER/kube-scheduler
set -euo pipefail
out=$(realpath -- "${1:?which folder is it to be written into?}")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here"/*.go "$here"/go.mod "$here"/go.sum "$work"
cd "$work"
${PROTOC:-protoc} --proto_path="$here/../../../proto" --go_out=. --go_opt=module=mig-agent.io \
  --go-grpc_out=. --go-grpc_opt=module=mig-agent.io migagent/v1/partition_manager.proto
export CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off
version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
go build -trimpath -buildvcs=false -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" -o "$out/kube-scheduler" .
