#!/usr/bin/env bash
# Builds the programs of a real Kubernetes node out of the modules beside this script, once, and prints the folder that they
# stand in. What was built stays in a cache outside the checkout, in a folder named after all that it was built from.
# Usage: build.sh [--find] [kubernetes|containerd|helm ...]     --find: build nothing, end with 3 where something is missing
# Cold on two cores: about 5 minutes for kubernetes, 1 for containerd, 2 for helm; 800 MB of programs, Go's own caches apart.
set -euo pipefail
shopt -s inherit_errexit
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${MIG_AGENT_E2E_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mig-agent-e2e}

find=""
if [ "${1:-}" = --find ]; then
  find=yes
  shift
fi
[ "$#" -gt 0 ] || set -- kubernetes containerd helm

version() { # MODULE FOLDER: the version that go.mod requires
  sed -nE "s#^(require |\t)$1 (v[^ ]*).*#\2#p" "$here/$2/go.mod" | grep -m1 .
}

flags() { # FOLDER: what the programs say when they are asked for their version
  local v
  case $1 in
    kubernetes) v=$(version k8s.io/kubernetes "$1") ;;
    containerd) v=$(version github.com/containerd/containerd/v2 "$1") ;;
    helm) v=$(version helm.sh/helm/v4 "$1") ;;
  esac
  case $1 in
    kubernetes)
      echo "-X k8s.io/component-base/version.gitVersion=$v -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=$(cut -d. -f2 <<<"$v")"
      ;;
    containerd) echo "-X github.com/containerd/containerd/v2/version.Version=$v" ;;
    helm) echo "-X helm.sh/helm/v4/internal/version.version=$v" ;;
  esac
}

build() { # FOLDER
  local key place aside began ldflags
  key=$(cat "$here/$1/go.mod" "$here/$1/go.sum" "$here/build.sh" | sha256sum | cut -c1-16)
  place=$cache/$1-$key
  if [ ! -d "$place" ]; then
    [ -z "$find" ] || return 3
    if ! command -v go >/dev/null; then
      echo "cannot build $1 for the tests on a real cluster: there is no go on the PATH; install Go 1.26 or newer" >&2
      return 1
    fi
    mkdir -p "$cache"
    # Whoever comes second waits for the first, and finds its work done.
    exec 9>"$cache/$1.lock"
    flock 9
    if [ ! -d "$place" ]; then
      echo "building $1 (once, some minutes) ..." >&2
      began=$SECONDS
      ldflags="-s -w $(flags "$1")"
      # Built aside and put in place by one rename: a folder of that name is always whole.
      rm -rf "$cache/.$1."* # of a build that was killed
      aside=$(mktemp -d "$cache/.$1.XXXXXX")
      if ! (cd "$here/$1" && CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off nice -n 15 go build -trimpath -buildvcs=false \
        -tags "no_btrfs no_devmapper no_zfs" -ldflags "$ldflags" -o "$aside/" tool); then
        rm -rf "$aside"
        echo "cannot build $1 for the tests on a real cluster: go's own words are above" >&2
        return 1
      fi
      chmod 755 "$aside"
      mv -T "$aside" "$place"
      echo "built $1 in $((SECONDS - began)) s" >&2
    fi
    exec 9>&-
  fi
  echo "$place"
}

for folder in "$@"; do
  build "$folder"
done
