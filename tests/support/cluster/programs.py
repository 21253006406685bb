"""The programs that a cluster is made of: built ones (tests/e2e/modules) and Debian's."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.cluster.failures import ClusterError

ROOT = Path(__file__).resolve().parents[3]
_BUILD = ROOT / "tests/e2e/modules/build.sh"
CNI = Path("/usr/lib/cni")

_PACKAGES = {
    "/usr/bin/etcd": "etcd-server",
    "/usr/sbin/runc": "runc",
    "/bin/busybox": "busybox-static",
    "/usr/bin/buildah": "buildah",
    "/usr/bin/mmdebstrap": "mmdebstrap",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/sbin/ip": "iproute2",
    "/usr/bin/nsenter": "util-linux",
}
"""A file that has to be there, and Debian's package which has it."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Absolute paths by the name of the program."""

    folders: tuple[Path, ...]

    def __getitem__(self, name: str) -> str:
        found = shutil.which(name, path=self.path)
        if found is None:
            raise ClusterError(f"cannot find {name} in {self.path}")
        return found

    @property
    def path(self) -> str:
        """For the PATH variable."""
        machine = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return ":".join([*map(str, self.folders), machine])


def cache() -> Path:
    """Where whatever takes long to make is kept, outside the checkout."""
    named = os.environ.get("MIG_AGENT_E2E_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mig-agent-e2e"


def ensure() -> Programs:
    """Installs and builds what is missing (minutes, with words on stderr); ClusterError where that cannot be done."""
    if os.geteuid() != 0:
        raise ClusterError("cannot make a cluster: that needs root, for namespaces, mounts and cgroups; try sudo")
    _install_packages()
    built = subprocess.run([str(_BUILD)], stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise ClusterError(f"cannot make a cluster: {_BUILD} ended with {built.returncode}; its words are above")
    return Programs(tuple(Path(line) for line in built.stdout.split()))


def _install_packages() -> None:
    missing = sorted({package for file, package in _PACKAGES.items() if not Path(file).exists()})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"cannot make a cluster: Debian's packages are missing and there is no apt-get: {missing}")
    print(f"installing {' '.join(missing)} (once) ...", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", "--quiet", *command], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0 and command[0] == "install":
            raise ClusterError(f"cannot install {' '.join(missing)}:\n{done.stdout}{done.stderr}")
