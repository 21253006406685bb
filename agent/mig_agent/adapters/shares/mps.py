"""MPS control daemons: one for each share of a GPU whose memory limit MPS enforces.

`nvidia-cuda-mps-control` starts a daemon, and sends it the commands of its standard input. It exits with 0 whatever a
daemon refuses, so everything that matters is read back. A daemon outlives the agent.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.core.errors import ConfigError, DriverError, DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid

PROGRAM = "nvidia-cuda-mps-control"
LONGEST_PIPE_PATH = 87
"""Bytes of the pipe folder's path; with more the daemon cannot name its sockets."""
_LONGEST_GENERATION = 12
"""The most digits of a generation: no agent creates so many instances."""
_MIB_OF_G = 1024
_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_PIPE_PREFIX = os.fsencode(f"{_PIPE_VARIABLE}=")
_PID_FILE = "nvidia-cuda-mps-control.pid"
"""The file with the daemon's pid in the pipe folder, from driver 550 on."""
_LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_OWN_SEARCH, _OWN_ALL, _SEARCH = 0o711, 0o700, 1
_POLL_SECONDS = 0.02
_GENERATION = re.compile(rf"[1-9]\d{{0,{_LONGEST_GENERATION - 1}}}", re.ASCII)
_ACL = "system.posix_acl_access"
_ACL_USER = 0x02
_ACL_ENTRY = "<HHI"


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsTerms:
    """The limits that one daemon enforces on its clients."""

    gpu: GpuUuid
    limit_mib: int
    """The most memory of each client process."""
    uid: int | None
    """The user whose processes may connect; None: everybody's."""
    thread_percentage: int | None = None
    """The most of the GPU's multiprocessors that a client uses, in per cent; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDaemon:
    """A control daemon that runs now."""

    pid: int
    is_stopped: bool
    """True if a signal or a debugger stopped it: then it answers no command until it is continued."""


class MpsDaemons:
    """Starts, asks and ends daemons, each in a folder of its own, named by the generation of its share.

    Blocking and thread-safe for different generations. Methods raise DriverError where the daemon or its program fails
    or does not answer in time; a daemon that is stopped holds nothing up for longer than `deadline_seconds`.
    """

    def __init__(self, folder: Path, *, search_path: str, deadline_seconds: float = 10.0) -> None:
        """Use `folder`; the programs are looked for on `search_path`, as in PATH.

        Raises ConfigError if the folder's path is too long for the sockets of a daemon.
        """
        self._folder = folder
        self._search_path = search_path
        self._deadline = deadline_seconds
        longest = len(os.fsencode(folder / ("9" * _LONGEST_GENERATION) / "pipe"))
        if longest > LONGEST_PIPE_PATH:
            raise ConfigError(
                f"cannot keep MPS daemons in {folder}: its path is {longest - LONGEST_PIPE_PATH} bytes too long",
                "name a run folder with a shorter path",
            )

    @property
    def is_installed(self) -> bool:
        """True if the program is on the search path."""
        return shutil.which(PROGRAM, path=self._search_path) is not None

    def existing(self) -> tuple[Generation, ...]:
        """Return the generations that have a folder, or a daemon whose folder was removed under it."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 -- names are all that is needed
        except FileNotFoundError:
            names = []
        found = {Generation(int(name)) for name in names if _GENERATION.fullmatch(name)}
        return tuple(sorted(found | self._by_generation(of_mps=True).keys()))

    def pipe_folder(self, generation: Generation) -> Path:
        """Return the folder through which the clients of a daemon connect."""
        return self._folder / str(generation) / "pipe"

    def environment(self, generation: Generation, terms: MpsTerms) -> Mapping[str, str]:
        """Return the variables with which a process becomes a client.

        Exactly one device and one limit, of ordinal 0: an entry for a device that a process cannot see makes the driver
        drop all limits.
        """
        found = {
            _PIPE_VARIABLE: str(self.pipe_folder(generation)),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={terms.limit_mib}M",
        }
        if terms.thread_percentage is not None:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(terms.thread_percentage)
        return found

    def start(self, generation: Generation, terms: MpsTerms) -> None:
        """Start a daemon and set its limits before anybody can connect.

        The error's `left_behind` is True where `stop` has to be called. Never starts a second daemon in a folder that
        was used: its clients would run with the limits of the second, which has none until they are set.
        """
        what = f"start of the MPS daemon of share {generation}"
        home = self._folder / str(generation)
        try:
            with FAILPOINTS.around("mps-folder"):
                self._make_folders(home)
        except FileExistsError as error:
            raise DriverError(DriverErrorKind.IN_USE, what, detail=f"{home} exists") from error
        except OSError as error:
            raise DriverError(
                DriverErrorKind.UNKNOWN, what, detail=f"{home}: {error.strerror}", left_behind=True
            ) from error
        try:
            self._run(generation, "-d", visible=terms.gpu, what=what)
            self._set_limits(generation, terms, what)
            with FAILPOINTS.around("mps-access"):
                _let_in(home / "pipe", terms.uid)
        except DriverError as error:
            error.left_behind = True
            raise
        except OSError as error:
            raise DriverError(
                DriverErrorKind.UNKNOWN, what, detail=f"{home}: {error.strerror}", left_behind=True
            ) from error

    def check(self, generation: Generation, terms: MpsTerms) -> None:
        """Check that the daemon answers and has its limits; it loses them when it starts again."""
        self._check_limits(generation, terms, f"check of the MPS daemon of share {generation}")

    def clients(self, generation: Generation) -> tuple[int, ...]:
        """Return the process ids of the clients."""
        what = f"list of the MPS clients of share {generation}"
        found: list[int] = []
        for server in _numbers(self._ask(generation, "get_server_list", what)):
            found += _numbers(self._ask(generation, f"get_client_list {server}", what))
        return tuple(found)

    def terminate(self, generation: Generation, client: int) -> bool:
        """End a client's use of the GPU without disturbing the others, as a signal alone may; False if it is none."""
        what = f"end of the MPS client {client} of share {generation}"
        for server in _numbers(self._ask(generation, "get_server_list", what)):
            if client in _numbers(self._ask(generation, f"get_client_list {server}", what)):
                self._ask(generation, f"terminate_client {server} {client}", what)
                return True
        return False

    def stop(self, generation: Generation) -> None:
        """End a daemon with its servers, killed if they do not end by themselves, and remove its folder.

        Nothing happens if there is none.
        """
        what = f"end of the MPS daemon of share {generation}"
        home = self._folder / str(generation)
        if not home.exists() and not self.pids(generation):
            return
        daemon = self.daemon(generation)
        if daemon is None or not daemon.is_stopped:
            with contextlib.suppress(DriverError):
                self._ask(generation, f"quit -t {max(1, int(self._deadline / 2))}", what)
        until = time.monotonic() + self._deadline
        while pids := self.pids(generation):
            if time.monotonic() > until:
                raise DriverError(DriverErrorKind.TIMEOUT, what, detail=f"processes {pids} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        try:
            with FAILPOINTS.around("mps-removal"), contextlib.suppress(FileNotFoundError):
                shutil.rmtree(home)
        except OSError as error:
            raise DriverError(DriverErrorKind.UNKNOWN, what, detail=f"{home}: {error.strerror}") from error

    def daemon(self, generation: Generation) -> RunningDaemon | None:
        """Return the daemon as the kernel shows it, without a command to it; None if none runs."""
        wanted = self._variable(generation)
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.pipe_folder(generation) / _PID_FILE).read_text(encoding="ascii"))
            if wanted in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                state = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[0]
                return None if state in {b"Z", b"X"} else RunningDaemon(pid=pid, is_stopped=state in {b"T", b"t"})
        return None

    def users(self) -> Mapping[Generation, tuple[int, ...]]:
        """Return the processes whose environment names a daemon's pipe folder, daemons and servers left out."""
        return self._by_generation(of_mps=False)

    def _by_generation(self, *, of_mps: bool) -> Mapping[Generation, tuple[int, ...]]:
        found: dict[Generation, list[int]] = {}
        for pid, variables, words in _processes():
            for each in variables:
                if each.startswith(_PIPE_PREFIX) and _is_of_mps(words) is of_mps:
                    generation = self._generation_of(Path(os.fsdecode(each[len(_PIPE_PREFIX) :])))
                    if generation is not None and self._may_connect(generation, pid):
                        found.setdefault(generation, []).append(pid)
        return {generation: tuple(sorted(pids)) for generation, pids in found.items()}

    def _generation_of(self, pipe: Path) -> Generation | None:
        home = pipe.parent
        ours = pipe.name == "pipe" and home.parent == self._folder and _GENERATION.fullmatch(home.name)
        return Generation(int(home.name)) if ours else None

    def _may_connect(self, generation: Generation, pid: int) -> bool:
        """Return whether a process can reach a daemon: anybody may write anything into an environment of their own."""
        pipe = self.pipe_folder(generation)
        try:
            uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 -- for each process of the machine
            if uid in {0, os.geteuid()} or pipe.stat().st_mode & _SEARCH:
                return True
            return _user_let_in(os.getxattr(pipe, _ACL)) == uid
        except OSError:
            return False

    def _variable(self, generation: Generation) -> bytes:
        return _PIPE_PREFIX + os.fsencode(self.pipe_folder(generation))

    def pids(self, generation: Generation) -> tuple[int, ...]:
        """Return the processes of the daemon and its servers, found by their environment; its clients are left out."""
        wanted = self._variable(generation)
        return tuple(pid for pid, variables, words in _processes() if wanted in variables and _is_of_mps(words))

    def _make_folders(self, home: Path) -> None:
        # Others may pass through to the pipe folder, which lets in its client alone, and see nothing else.
        self._folder.mkdir(mode=_OWN_SEARCH, exist_ok=True, parents=True)
        self._folder.chmod(_OWN_SEARCH)
        home.mkdir()
        home.chmod(_OWN_SEARCH)
        (home / "pipe").mkdir(mode=_OWN_ALL)
        (home / "log").mkdir(mode=_OWN_ALL)

    def _set_limits(self, generation: Generation, terms: MpsTerms, what: str) -> None:
        self._ask(generation, f"set_default_device_pinned_mem_limit 0 {terms.limit_mib}M", what)
        if terms.thread_percentage is not None:
            self._ask(generation, f"set_default_active_thread_percentage {terms.thread_percentage}", what)
        self._check_limits(generation, terms, what)

    def _check_limits(self, generation: Generation, terms: MpsTerms, what: str) -> None:
        limit = self._ask(generation, "get_default_device_pinned_mem_limit 0", what)
        if limit != (shown_limit(terms.limit_mib),):
            raise DriverError(DriverErrorKind.READ_BACK, what, detail=f"its limit is {' '.join(limit) or 'none'}")
        if terms.thread_percentage is not None:
            percentage = self._ask(generation, "get_default_active_thread_percentage", what)
            if percentage != (f"{terms.thread_percentage:.1f}",):
                raise DriverError(
                    DriverErrorKind.READ_BACK, what, detail=f"its thread percentage is {' '.join(percentage)}"
                )

    def _ask(self, generation: Generation, command: str, what: str) -> tuple[str, ...]:
        """Return the lines that a daemon answers."""
        return self._run(generation, command=command, what=what)

    def _run(
        self, generation: Generation, *arguments: str, command: str = "", visible: str = "", what: str
    ) -> tuple[str, ...]:
        home = self._folder / str(generation)
        variables = {
            "PATH": self._search_path,  # the daemon looks for its server there
            _PIPE_VARIABLE: str(home / "pipe"),
            _LOG_VARIABLE: str(home / "log"),
            **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}),
        }
        program = shutil.which(PROGRAM, path=self._search_path)
        if program is None:
            raise DriverError(DriverErrorKind.NOT_SUPPORTED, what, detail=f"{PROGRAM} is not installed")
        try:
            with FAILPOINTS.around("mps-program"):
                done = subprocess.run(  # noqa: S603 -- a program of the driver, found on the configured path
                    [program, *arguments],
                    input=f"{command}\n" if command else "",
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=self._deadline,
                    check=False,
                    env=variables,
                    start_new_session=True,
                )
        except subprocess.TimeoutExpired as error:
            raise DriverError(DriverErrorKind.TIMEOUT, what, detail=f"{PROGRAM} does not answer") from error
        except OSError as error:
            raise DriverError(DriverErrorKind.UNKNOWN, what, detail=f"{program}: {error.strerror}") from error
        if done.returncode:
            kind = DriverErrorKind.NOT_FOUND if command else DriverErrorKind.UNKNOWN
            said = " ".join((done.stderr or done.stdout).split()) or f"{PROGRAM} exited with {done.returncode}"
            raise DriverError(kind, what, detail=said)
        return tuple(done.stdout.splitlines())


def shown_limit(limit_mib: int) -> str:
    """Return a limit as a daemon shows it: `3G` for all from 3072 to 4095 MiB, `512M` below one G."""
    return f"{limit_mib // _MIB_OF_G}G" if limit_mib >= _MIB_OF_G else f"{limit_mib}M"


_NUMBER = re.compile(r"\d+", re.ASCII)


def _numbers(lines: tuple[str, ...]) -> list[int]:
    return [int(line) for line in lines if _NUMBER.fullmatch(line)]


def _processes() -> Iterator[tuple[int, frozenset[bytes], bytes]]:
    """Yield each process that may be seen: its id, its variables and its command line."""
    for name in os.listdir("/proc"):  # noqa: PTH208 -- names are all that is needed
        if name.isdigit():
            with contextlib.suppress(OSError):
                variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
                yield int(name), frozenset(variables), Path("/proc", name, "cmdline").read_bytes()


def _is_of_mps(words: bytes) -> bool:
    return b"mps" in words and (b"control" in words or b"server" in words)


def _let_in(folder: Path, uid: int | None) -> None:
    """Let a user, or everybody, pass through a folder; only its owner can change what is in it."""
    if uid is None:
        folder.chmod(_OWN_SEARCH)
    elif uid != 0:
        os.setxattr(folder, _ACL, _acl(uid))


def _acl(uid: int) -> bytes:
    """Return an access control list: all for the owner, passing through for one user, nothing for the others.

    The layout is Linux's (include/uapi/linux/posix_acl_xattr.h): a version, then entries of tag, rights and id.
    """
    owner, group, mask, other = 0x01, 0x04, 0x10, 0x20
    unused = 0xFFFFFFFF
    entries = (
        (owner, 7, unused),
        (_ACL_USER, _SEARCH, uid),
        (group, 0, unused),
        (mask, _SEARCH, unused),
        (other, 0, unused),
    )
    return struct.pack("<I", 2) + b"".join(struct.pack(_ACL_ENTRY, *each) for each in entries)


def _user_let_in(acl: bytes) -> int | None:
    """Return the user whom an access control list of `_acl` names."""
    return next((uid for tag, _, uid in struct.iter_unpack(_ACL_ENTRY, acl[4:]) if tag == _ACL_USER), None)
