"""The driver's user space for containers: libraries, programs, sockets, and the hooks that make them found.

NVIDIA's container toolkit knows where they are: `nvidia-ctk cdi generate` writes it, on any distribution. The agent
uses the edits that all devices share; devices and their nodes are its own. The toolkit runs as installed on the
machine: an agent in a container reaches the machine's files through its first process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.host import Host

MOST_SECONDS = 10.0
"""Time limit for `nvidia-ctk`, which normally takes one or two seconds."""
_KILLED_SECONDS = 1.0
_TRY_AGAIN_SECONDS = 60.0
"""Delay before trying again after a failure, or after a result without the sockets of the driver's daemons."""
_MACHINE = Path("/proc/1/root")
"""The machine's own files, also from a container that sees the machine's processes (hostPID)."""
_FOLDERS = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "opt/nvidia/toolkit", "run/current-system/sw/bin")
"""Folders in which distributions, and NVIDIA's GPU operator, install the toolkit."""
_OPERATOR_DRIVER = "run/nvidia/driver"
"""Where the GPU operator mounts a driver that itself runs in a container."""
_OWN_VARIABLES = ("NVIDIA_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES=")
_MODES = ((), ("--mode=management",))
"""Options in the order of trial: the toolkit's own choice, then without NVML.

Some versions need the second where MIG mode is on without instances. It finds the libraries, but not the sockets of the
driver's daemons.
"""
_SHOWN_OF_WORDS = 300
Edit = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """The `containerEdits` of a CDI file, with nothing in them that is newer than CDI 0.5.0."""

    mounts: tuple[Edit, ...] = ()
    hooks: tuple[Edit, ...] = ()
    variables: tuple[str, ...] = ()

    def as_cdi(self) -> dict[str, object]:
        """Return the edits as in the file, without empty parts."""
        parts = {"env": self.variables, "mounts": self.mounts, "hooks": self.hooks}
        return {name: list(part) for name, part in parts.items() if part}


class _FailedError(Exception):
    """Raised where no edits could be made; the text says why."""


class NotNowError(Exception):
    """The toolkit would have to run, which opens the driver, but the agent has released the driver."""


class DriverLibraries:
    """Finds the edits once per version of driver and toolkit. Thread-safe: concurrent callers wait."""

    def __init__(
        self,
        host: Host,
        report: Callable[[str], None],
        *,
        machine: Path = _MACHINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` is called with the reason why there are none, once per reason, in the thread of the caller."""
        self._host = host
        self._report = report
        self._machine = machine
        self._clock = clock
        self._mutex = threading.Lock()
        self._found: tuple[object, Edits, float] | None = None
        """The key it was found for, the edits, and until when they are valid."""
        self._failed: tuple[object, float] | None = None
        self._reported = ""
        self.driver_released = False
        """Set while the agent has released the driver: the toolkit is not run then."""

    def find(self) -> Edits:
        """Return the edits that every container needs; none if they cannot be found, which is logged and retried later.

        Never those of another driver version: a container with missing mounts does not start at all. Raises
        NotNowError.
        """
        with self._mutex:
            root = self._root()
            program = self._program(root)
            key = (self._driver_version(), program, _changed_at(root, program))
            if self._found is not None and self._is_valid(root, key, *self._found):
                return self._found[1]
            if self._failed is not None and self._failed[0] == key and self._clock() < self._failed[1]:
                return Edits()
            if self.driver_released and program:
                raise NotNowError
            try:
                edits, is_whole = self._generate(root, program)
            except _FailedError as error:
                self._failed = (key, self._clock() + _TRY_AGAIN_SECONDS)
                self._report_once(str(error))
                return Edits()
            until = math.inf if is_whole else self._clock() + _TRY_AGAIN_SECONDS
            self._found, self._failed, self._reported = (key, edits, until), None, ""
            return edits

    def _is_valid(self, root: Path, key: object, found_for: object, edits: Edits, until: float) -> bool:
        return key == found_for and self._clock() < until and self._all_exist(root, edits)

    def _report_once(self, words: str) -> None:
        if words != self._reported:
            self._reported = words
            self._report(f"cannot give the driver's libraries to pods, which start without them: {words}")

    def _root(self) -> Path:
        """Return where this process sees the machine's files: `/`, unless it is in a container."""
        try:
            if os.path.samestat(self._machine.stat(), Path("/").stat()):
                return Path("/")
            os.scandir(self._machine).close()
        except OSError:
            return Path("/")
        return self._machine

    @staticmethod
    def _program(root: Path) -> str:
        """Return the program's path on the machine; empty if there is none."""
        found = (f"/{folder}/nvidia-ctk" for folder in _FOLDERS if (root / folder / "nvidia-ctk").exists())
        return next(found, "")

    def _driver_version(self) -> str:
        try:
            return (self._host.root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    @staticmethod
    def _all_exist(root: Path, edits: Edits) -> bool:
        """Return True if every file still exists: reinstalling the same driver version may have moved them."""
        paths = [str(mount["hostPath"]) for mount in edits.mounts] + [str(hook["path"]) for hook in edits.hooks]
        return all((root / path.lstrip("/")).exists() for path in paths)

    def _generate(self, root: Path, program: str) -> tuple[Edits, bool]:
        """Run the toolkit; return the edits, and True if they are complete."""
        if not program:
            folders = ", ".join(f"/{folder}" for folder in _FOLDERS)
            raise _FailedError(
                f"there is no nvidia-ctk on this machine (looked in {folders}); install the NVIDIA container toolkit"
            )
        words = []
        until = self._clock() + MOST_SECONDS
        for mode in _MODES:
            try:
                return _read(self._run(root, program, mode, until - self._clock())), not mode
            except _FailedError as error:
                words.append(str(error))
        raise _FailedError("; then ".join(dict.fromkeys(words)))

    @staticmethod
    def _run(root: Path, program: str, mode: Sequence[str], seconds: float) -> bytes:
        command = [program, "cdi", "generate", "--format=json", *mode]
        if (root / _OPERATOR_DRIVER / "usr/bin").is_dir():
            command.append(f"--driver-root=/{_OPERATOR_DRIVER}")
        if root != Path("/"):
            command = [shutil.which("chroot") or "/usr/sbin/chroot", str(root), *command]
        path = os.pathsep.join(f"/{folder}" for folder in (*_FOLDERS, "usr/sbin", "bin", "sbin"))
        code, output, words = _outcome(command, path, max(seconds, 0.1))
        if code is None:
            raise _FailedError(f"{program} did not end within {MOST_SECONDS:.0f} s")
        if code != 0:
            lines = words.decode(errors="replace").strip().splitlines()
            last = lines[-1][:_SHOWN_OF_WORDS] if lines else "it says nothing"
            raise _FailedError(f"{program} ended with {code}: {last}")
        return output


def _outcome(command: Sequence[str], path: str, seconds: float) -> tuple[int | None, bytes, bytes]:
    """Run a program; return exit code, output and error output; the code is None on timeout. Raises _FailedError.

    A program that hangs in the driver cannot be killed: it is left behind without waiting for it.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 -- fixed arguments, and a program that root installed
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": path},
            cwd="/",
        )
    except OSError as error:
        raise _FailedError(f"{command[0]} cannot be run: {error.strerror or error}") from None
    try:
        output, words = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_SECONDS)
        return None, b"", b""
    return process.returncode, output, words


def _changed_at(root: Path, program: str) -> int:
    try:
        return (root / program[1:]).stat().st_mtime_ns if program else 0
    except OSError:
        return 0


def _read(output: bytes) -> Edits:
    """Parse the output of `nvidia-ctk`. Raises _FailedError if it is not CDI."""
    try:
        whole = json.loads(output)
        whole["cdiVersion"]  # any version: what is used has been in it since 0.4.0
        edits = whole.get("containerEdits") or {}
        variables = tuple(str(each) for each in edits.get("env") or ())
        return Edits(
            mounts=tuple(_known_fields(edits.get("mounts"), "hostPath", "containerPath", "options", "type")),
            hooks=tuple(_known_fields(edits.get("hooks"), "hookName", "path", "args", "env", "timeout")),
            variables=tuple(each for each in variables if not each.startswith(_OWN_VARIABLES)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _FailedError(f"nvidia-ctk wrote something else than CDI ({type(error).__name__}: {error})") from None


def _known_fields(entries: Sequence[Edit] | None, *names: str) -> Iterator[Edit]:
    """Yield each entry with the fields that CDI 0.5.0 knows; the first two are required."""
    for entry in entries or ():
        yield {name: entry[name] for name in names if name in names[:2] or entry.get(name) is not None}
