#!/usr/bin/env bash
# Writes the go.mod and go.sum of the modules beside this script again, after a version below was changed.
# They are tools of the tests' own: nothing of the product is made from them. Needs Go and its module proxy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

kubernetes=v1.36.3 # and in examples/kube-scheduler, by hand: plugin/go.mod, extender/deployment.yaml
containerd=v2.4.2
helm=v4.3.1

# The parts of Kubernetes live in folders of its repository ("staging"), which its go.mod puts in place of the modules of
# those names; a module outside the repository has to name the published ones. v1.36.3 is published as v0.36.3.
staging() {
  local mod
  mod=$(cd "$(mktemp -d)" && go mod download -json "k8s.io/kubernetes@$kubernetes" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
  go mod edit -json "$mod" |
    sed -n 's/^\t*"Path": "\.\/staging\/src\/\(.*\)"$/\1/p' | sort -u
}

start() { # FOLDER, then the tools
  local folder=$1
  shift
  rm -f "$folder/go.mod" "$folder/go.sum"
  {
    echo "module mig-agent.io/tests/$folder"
    echo
    echo "go 1.26.0"
    echo
    for tool in "$@"; do echo "tool $tool"; done
    echo
  } >"$folder/go.mod"
}

start kubernetes k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kubectl}
{
  echo "require k8s.io/kubernetes $kubernetes"
  echo
  staging | while read -r part; do echo "replace $part => $part v0${kubernetes#v1}"; done
} >>kubernetes/go.mod

start containerd github.com/containerd/containerd/v2/cmd/{containerd,containerd-shim-runc-v2,ctr}
echo "require github.com/containerd/containerd/v2 $containerd" >>containerd/go.mod

start helm helm.sh/helm/v4/cmd/helm
echo "require helm.sh/helm/v4 $helm" >>helm/go.mod

for folder in kubernetes containerd helm; do
  (cd "$folder" && GOFLAGS=-mod=mod go mod tidy)
done
