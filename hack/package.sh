#!/usr/bin/env bash
# Builds what others install mig-agent from, into dist/:
#   deb      mig-agent_VERSION-REVISION_ARCH.deb: agent, service, migctl, man pages, completion, documents
#   client   mig_agent_client-VERSION-py3-none-any.whl: the Python client alone, with migctl as an extra
# Usage: hack/package.sh [deb|client] [--out FOLDER] [--revision N]      without deb or client: both
#
# The .deb is for the Debian or Ubuntu whose own Python has the version that builds it: 3.11 is Debian 12; others by
# PYTHON=python3.12. The same checkout gives the same bits: exact packages by hash, times from SOURCE_DATE_EPOCH (without it
# the last commit's).
set -euo pipefail
shopt -s inherit_errexit
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

what="" out=$root/dist revision=1 python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
  case $1 in
  deb | client) what=$1 ;;
  --out) out=${2:?} && shift ;;
  --revision) revision=${2:?} && shift ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
  esac
  shift
done
fail() {
  echo "cannot build the package: $1" >&2
  exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is not Python 3.11 or newer; name another with PYTHON=..."
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root"
umask 022
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)
fi
# What Python writes beside modules that it imports here would be packed, too.
export PYTHONDONTWRITEBYTECODE=1
export SOURCE_DATE_EPOCH LC_ALL=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' agent/mig_agent/__init__.py)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "building wheels ..." >&2
"$python" -m venv "$work/build" || fail "$python has no venv module; on Debian and Ubuntu: apt install python3-venv"
"$work/build/bin/pip" --quiet install --require-hashes --only-binary :all: -r deploy/requirements-build.txt
wheel_of() { # FOLDER
  "$work/build/bin/pip" --quiet wheel --no-deps --no-build-isolation --wheel-dir "$work/wheels" "$1"
}

build_client() {
  wheel_of ./client
  cp "$work/wheels"/mig_agent_client-*.whl "$out/"
  ls "$out"/mig_agent_client-"$version"-*.whl
}

build_deb() {
  command -v dpkg-deb >/dev/null || fail "there is no dpkg-deb: a Debian package is built on Debian or Ubuntu"
  local abi stage=$work/stage home=usr/lib/mig-agent architecture doc
  abi=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  architecture=$(dpkg --print-architecture)
  wheel_of .

  echo "installing the libraries ..." >&2
  mkdir -p "$stage/$home" "$stage/DEBIAN"
  "$python" -m venv --without-pip "$stage/$home"
  local pip=("$work/build/bin/pip" --quiet --python "$stage/$home/bin/python3" install --no-compile --no-warn-script-location)
  "${pip[@]}" --require-hashes --only-binary :all: -r deploy/requirements.txt
  "${pip[@]}" --no-index --no-deps "$work/wheels"/mig_agent-*.whl
  # Its interpreter is the machine's own, which -I keeps apart from what users have in PYTHONPATH.
  find "$stage/$home/bin" -mindepth 1 ! -name mig-agent ! -name migctl ! -name migctl-python \
    ! -name kubectl-mig -delete
  ln -s "../../../bin/$abi" "$stage/$home/bin/python3"
  sed -i "1s|^#!.*|#!/$home/bin/python3 -I|" "$stage/$home/bin"/{mig-agent,migctl-python,kubectl-mig}
  printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\n' "${abi#python}" >"$stage/$home/pyvenv.cfg"
  # Kubernetes' library for asyncio is larger than all else together, and nothing imports it.
  rm -r "$stage/$home/lib/$abi/site-packages/kubernetes/aio"
  # They name files of this build. And it is dpkg that removes them.
  find "$stage/$home" \( -name RECORD -o -name direct_url.json -o -name REQUESTED -o -name INSTALLER \) -delete
  rm -rf "$stage/$home/include" "$stage/$home/lib64" "$stage/$home/share"
  # One process, files in order: what marshal writes depends on what the process compiled before.
  PYTHONHASHSEED=0 "$python" -m compileall -q --invalidation-mode unchecked-hash -s "$stage" -p / "$stage/$home/lib" ||
    fail "a module cannot be compiled"

  mkdir -p "$stage/usr/bin"
  ln -s ../lib/mig-agent/bin/{mig-agent,migctl,kubectl-mig} "$stage/usr/bin/"
  install -D -m 644 deploy/mig-agent.service "$stage/usr/lib/systemd/system/mig-agent.service"
  sed -i -E 's|^(Exec[A-Za-z]+)=mig-agent |\1=/usr/bin/mig-agent |' "$stage/usr/lib/systemd/system/mig-agent.service"
  install -D -m 644 deploy/debian/mig-agent.sysusers "$stage/usr/lib/sysusers.d/mig-agent.conf"
  install -D -m 644 deploy/debian/mig-agent.tmpfiles "$stage/usr/lib/tmpfiles.d/mig-agent.conf"
  install -D -m 644 deploy/debian/config.yaml "$stage/etc/mig-agent/config.yaml"
  install -D -m 644 deploy/debian/lintian-overrides "$stage/usr/share/lintian/overrides/mig-agent"

  # What the programs tell of themselves, from the programs that are packaged.
  local packages="$stage/$home/lib/$abi/site-packages"
  PYTHONPATH=$packages PYTHONDONTWRITEBYTECODE=1 "$python" hack/manpages.py "$stage/usr/share/man"
  gzip -9n "$stage"/usr/share/man/*/*
  migctl() { PYTHONPATH=$packages PYTHONDONTWRITEBYTECODE=1 "$python" -m mig_agent.migctl "$@"; }
  mkdir -p "$stage/usr/share/bash-completion/completions" "$stage/usr/share/zsh/vendor-completions" \
    "$stage/usr/share/fish/vendor_completions.d"
  migctl completion bash >"$stage/usr/share/bash-completion/completions/migctl"
  migctl completion zsh >"$stage/usr/share/zsh/vendor-completions/_migctl"
  migctl completion fish >"$stage/usr/share/fish/vendor_completions.d/migctl.fish"

  doc=$stage/usr/share/doc/mig-agent
  mkdir -p "$doc"
  cp -r docs/. "$doc/"
  cp README.md "$doc/"
  install -m 644 deploy/debian/copyright "$doc/copyright"
  gzip -9nc CHANGELOG.md >"$doc/changelog.gz"
  printf 'mig-agent (%s-%s) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- %s  %s\n' "$version" "$revision" \
    "$(sed -n 's/^Maintainer: //p' deploy/debian/control)" "$(date -uRd "@$SOURCE_DATE_EPOCH")" |
    gzip -9n >"$doc/changelog.Debian.gz"

  chmod -R u=rwX,go=rX "$stage"
  find "$stage/$home/lib" -type f -exec chmod 644 {} +
  install -m 755 deploy/debian/postinst deploy/debian/prerm deploy/debian/postrm "$stage/DEBIAN/"
  echo /etc/mig-agent/config.yaml >"$stage/DEBIAN/conffiles"
  (cd "$stage" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$stage/DEBIAN/md5sums"
  sed -e "s|@VERSION@|$version-$revision|" -e "s|@ARCHITECTURE@|$architecture|" -e "s|@PYTHON@|$abi|" \
    -e "s|@SIZE@|$(find "$stage/usr" "$stage/etc" -type f -printf '%s\n' | awk '{n += int($1 / 1024) + 1} END {print n}')|" \
    deploy/debian/control >"$stage/DEBIAN/control"
  find "$stage" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
  dpkg-deb --root-owner-group --build "$stage" "$out/mig-agent_$version-${revision}_$architecture.deb" >/dev/null
  ls "$out/mig-agent_$version-${revision}_$architecture.deb"
}

case $what in
deb) build_deb ;;
client) build_client ;;
*) build_deb && build_client ;;
esac
