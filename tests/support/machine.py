"""A small Debian machine with a real systemd as its process 1, for tests of what is installed on one.

It is booted by systemd-nspawn in namespaces of its own, without a network, on a copy of a cached image that keeps all
changes over its reboots. Needs root, and no systemd outside. `python -m support.machine` builds the image.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SUITE = "bookworm"
_PACKAGES = ("adduser", "bash-completion", "dbus", "man-db", "python3", "python3-pip", "python3-venv", "systemd-sysv")
_TOOLS = {
    "/usr/bin/dpkg-deb": "dpkg",
    "/usr/bin/mmdebstrap": "mmdebstrap",
    "/usr/bin/nsenter": "util-linux",
    "/usr/bin/systemd-nspawn": "systemd-container",
}
"""A file that has to be there, and Debian's package which has it."""
_BUSY = ("man-db.timer", "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer")
"""Nothing that is tested, and work at moments of its own."""
_REBOOTED = 133
"""Exit code of systemd-nspawn when the machine wants to be started again."""
_BOOT_SECONDS = 60.0
_COMMAND_SECONDS = 120.0
_KEPT = 2
"""How many images stay in the cache."""
_START = r"""
set -eu
mount --make-rprivate /
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
mount -t overlay overlay -o "lowerdir=$image,upperdir=$run/upper,workdir=$run/work" "$run/root"
# With control groups of its own two machines do not meet.
for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
  if [ -w "$hierarchy/cgroup.procs" ] && mkdir -p "$hierarchy/$name" 2>/dev/null; then
    echo $$ >"$hierarchy/$name/cgroup.procs" || true
  fi
done
while :; do
  code=0
  # In the foreground of this shell, which is process 1 of a namespace: nothing outlives it.
  systemd-nspawn --quiet --boot --register=no --keep-unit --private-network --resolv-conf=off --timezone=off \
    --link-journal=no --console=pipe --machine="$name" --directory="$run/root" --bind-ro="$run/shared:/mnt" || code=$?
  [ "$code" -eq "$rebooted" ] || exit "$code"
done
"""


class MachineError(Exception):
    """A machine that cannot be made, or a command on it that failed."""


class Machine:
    """A running machine; it ends with the block."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mig-agent-machine-"))
        self.shared = self.folder / "shared"
        """What is in this folder is in /mnt on the machine, to be read."""
        self._name = f"mig-agent-{uuid.uuid4().hex[:8]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Boot it. Raises MachineError."""
        for name in ("shared", "upper", "work", "root"):
            (self.folder / name).mkdir()
        variables = {
            "image": str(image()),
            "run": str(self.folder),
            "name": self._name,
            "rebooted": str(_REBOOTED),
        }
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", _START],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_for_boot(before=0)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _console(self) -> Path:
        return self.folder / "console"

    def run(self, command: str | Sequence[str], *, user: str = "root", code: int | None = 0) -> str:
        """Run a line of shell or a command, and return what it prints on both of its outputs.

        Raises MachineError if it ends with another code than `code`; None takes any.
        """
        done = subprocess.run(
            self._inside(command, user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_COMMAND_SECONDS,
        )
        if code is not None and done.returncode != code:
            raise MachineError(f"{user}$ {command}\nended with {done.returncode}\n{done.stdout}")
        return done.stdout

    def start(self, command: str, *, user: str = "root") -> subprocess.Popen[str]:
        """Start a line of shell, and wait for nothing; its outputs come through one pipe."""
        return subprocess.Popen(
            self._inside(command, user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def reboot(self) -> None:
        """Reboot, and wait until systemd has started all."""
        before = self._leader()
        self.run("systemctl reboot", code=None)
        self._wait_for_boot(before=before)

    def stop(self) -> None:
        """End the machine as a power cut would, and remove what it wrote."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)  # the rest of it goes with `--kill-child` and the namespace
            self._process.wait()
        deadline = time.monotonic() + _BOOT_SECONDS
        for hierarchy in ("", "systemd", "unified"):
            top = Path("/sys/fs/cgroup") / hierarchy / self._name
            while top.exists() and time.monotonic() < deadline:
                if not _removed(top):
                    time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _inside(self, command: str | Sequence[str], user: str) -> list[str]:
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        login = [] if user == "root" else ["runuser", "-u", user, "--"]
        home = "/root" if user == "root" else f"/home/{user}"
        variables = _environment(HOME=home, USER=user, LOGNAME=user)
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wdns=/")
        return ["nsenter", f"--target={self._leader()}", *spaces, "env", "-i", *variables, *login, *argv]

    def _leader(self) -> int:
        """The machine's process 1, as it is numbered outside; 0 while there is none."""
        assert self._process is not None
        found = self._process.pid
        for _ in ("sh", "systemd-nspawn", "systemd"):
            try:
                children = Path(f"/proc/{found}/task/{found}/children").read_text().split()
            except OSError:
                return 0
            if not children:
                return 0
            found = int(children[0])
        return found

    def _wait_for_boot(self, before: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _BOOT_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._leader() not in {0, before}:
                state = self.run("systemctl is-system-running --wait", code=None).strip()
                if state in {"running", "degraded"}:
                    return
            time.sleep(0.05)
        raise MachineError(
            f"cannot boot a machine; its last words:\n{self._console.read_text(errors='replace')[-4000:]}"
        )


def _environment(**more: str) -> list[str]:
    fixed = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
    return [f"{name}={value}" for name, value in (fixed | more).items()]


def _removed(cgroup: Path) -> bool:
    """Remove control groups from below; False while a process is in one of them."""
    try:
        for folder, _, _ in os.walk(cgroup, topdown=False):
            Path(folder).rmdir()
    except OSError:
        return False
    return True


def image() -> Path:
    """The folder of the image, built where there is none: a minute. Raises MachineError."""
    cache = Path(
        os.environ.get("MIG_AGENT_E2E_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mig-agent-e2e"
    )
    cache.mkdir(parents=True, exist_ok=True)
    made_from = f"{SUITE} {_PACKAGES} {_BUSY} {inspect.getsource(_build)}"
    place = cache / f"machine-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    with (cache / "machine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds the work of the first done
        if not place.exists():
            _ensure_tools()
            print(f"building an image of Debian {SUITE} (once, a minute) ...", file=sys.stderr, flush=True)
            aside = Path(tempfile.mkdtemp(dir=cache, prefix=".machine-"))
            try:
                _build(aside)
                aside.rename(place)  # a folder of that name is always whole
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            older = sorted(cache.glob("machine-*"), key=lambda path: path.stat().st_mtime)[:-_KEPT]
            for each in older:
                shutil.rmtree(each, ignore_errors=True)
        os.utime(place)
    return place


def _build(root: Path) -> None:
    _must(
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        f"--include={','.join(_PACKAGES)}",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        SUITE,
        str(root),
    )
    root.chmod(0o755)
    (root / "etc/machine-id").write_text("")
    (root / "etc/hostname").write_text("machine\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost machine\n")
    for unit in _BUSY:
        (root / "etc/systemd/system" / unit).symlink_to("/dev/null")


def _ensure_tools() -> None:
    if os.geteuid() != 0:
        raise MachineError("cannot make a machine: that needs root, for namespaces and mounts; try sudo")
    missing = sorted({package for file, package in _TOOLS.items() if not Path(file).exists()})
    if not missing:
        return
    print(f"installing {' '.join(missing)} (once) ...", file=sys.stderr, flush=True)
    subprocess.run(["apt-get", "--quiet", "update"], capture_output=True, check=False)
    _must(
        "apt-get", "--quiet", "--yes", "--no-install-recommends", "install", *missing, DEBIAN_FRONTEND="noninteractive"
    )


def _must(*command: str, **variables: str) -> None:
    environment: Mapping[str, str] = os.environ | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MachineError(f"cannot make a machine: {' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    try:
        image()
    except MachineError as error:
        sys.exit(str(error))
