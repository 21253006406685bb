"""Shares whose memory limit the driver enforces on a cgroup: one cgroup for each share of a GPU without MIG mode.

The limit holds for all processes of the cgroup together. It is set before a process is moved in, so none is ever inside
without a limit, and taken back before the cgroup is removed: its ancestors would keep the guaranteed memory until the
machine is booted again. Needs root, NVIDIA driver r615 or newer, and cgroup v2.

The cgroups are in `/sys/fs/cgroup/mig-agent-NAME`, not below the agent's own: those would end with the agent's unit,
and have its MemoryMax. What is moved there leaves the limits of the session or batch job that it was in. A systemd unit
of the agent needs ProtectControlGroups=no, and no Delegate=, since it changes nothing below its own cgroup.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping

from mig_agent.adapters import processes
from mig_agent.adapters.cgroupfs import MOUNT, Cgroups
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import ComputeMode, Driver
from mig_agent.adapters.shares.enforcer import Share
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.core.shares import Enforcement

FIRST_DRIVER = 615
"""The first driver branch with memory limits of cgroups."""
_GENERATION = re.compile(r"[1-9][0-9]*", re.ASCII)
_POLL_SECONDS = 0.02


class CgroupEnforcer:
    """Enforces limits by NVML's memory limits of cgroups: `Enforcer`."""

    enforcement = Enforcement.CGROUP
    overhead_mib = 0
    needs_process = True

    def __init__(
        self, driver: Driver, host: Host, name: str, *, grace_seconds: float = 0.0, deadline_seconds: float = 10.0
    ) -> None:
        """Use the parent of cgroups with this name, which no other agent of the machine uses.

        At the end of a share, what the process that was handed over has started may end by itself for `grace_seconds`;
        then all is killed. Waits for at most `deadline_seconds` until that has ended, and until a cgroup can go.
        """
        self._driver = driver
        self._host = host
        self._grace = grace_seconds
        self._deadline = deadline_seconds
        self._handed_over: dict[Generation, int] = {}
        """The process of each share that was begun here, which only waits while nothing else is in the share."""
        self._cgroups = Cgroups(host.root / MOUNT, f"mig-agent-{name}")

    def why_not(self, gpu: GpuUuid) -> str:
        """Return why limits cannot be enforced on a GPU, as a phrase with its hint; empty if they can."""
        try:
            self._driver.memory_limit(gpu, self._cgroups.path("probe"))
        except DriverError as error:
            if error.kind is DriverErrorKind.NOT_SUPPORTED:
                return self._not_supported()
            # Whatever else it says of a cgroup that is not there: it has the call.
        mode = self._driver.compute_mode(gpu)
        if mode is not ComputeMode.DEFAULT:
            return f"its compute mode is {mode.name}; `nvidia-smi -i {gpu} -c DEFAULT` sets it back"
        return self._cgroups.why_not()

    def begin(self, share: Share) -> None:
        """Limit a cgroup of the share's own, read the limit back, and only then move the process in.

        Raises DriverError: IN_USE if a cgroup of that name has other processes or the process is in another share,
        NO_PERMISSION if it is another user's, NOT_FOUND if it has ended. The error's `left_behind` is True where `end`
        has to be called.
        """
        what, name = _what("start", share.generation), str(share.generation)
        process = share.process
        if process is None:
            detail = "it limits processes that are handed over, and there is none; start it by migctl run"
            raise DriverError(DriverErrorKind.INVALID_ARGUMENT, what, detail=detail)
        if share.thread_percentage is not None:
            detail = "a cgroup limits memory, not multiprocessors; leave the percentage out, or use mps"
            raise DriverError(DriverErrorKind.NOT_SUPPORTED, what, detail=detail)
        if share.uid is not None and processes.uid(process.pid) not in {share.uid, None}:
            detail = f"process {process.pid} belongs to another user; hand over one of your own"
            raise DriverError(DriverErrorKind.NO_PERMISSION, what, detail=detail)
        with _described(what):
            self._refuse_used(name, process.pid, what)
        try:
            with _described(what):
                folder = self._cgroups.make(name)
                self._driver.set_memory_limit(share.gpu, folder, share.limit_mib)
                self._cgroups.join(name, process.pid, process.started)
                self._handed_over[share.generation] = process.pid
        except DriverError as error:
            error.left_behind = True
            raise

    def check(self, share: Share) -> None:
        """Check that the limit holds. Raises DriverError (NOT_FOUND, READ_BACK) if it was lost."""
        what, folder = _what("check", share.generation), self._cgroups.path(str(share.generation))
        if not folder.is_dir():
            raise DriverError(DriverErrorKind.NOT_FOUND, what, detail=f"there is no {folder}")
        self._driver.check_memory_limit(share.gpu, folder, share.limit_mib)

    def environment(self, share: Share) -> Mapping[str, str]:  # noqa: ARG002 -- of the protocol
        """Return no variables: the limit holds for whatever is inside."""
        return {}

    def processes(self, share: Share) -> tuple[int, ...]:
        """Return the ids of the processes in the share's cgroup."""
        with _described(_what("look at the processes", share.generation)):
            return self._cgroups.members(str(share.generation))

    def end(self, gpu: GpuUuid, generation: Generation) -> None:
        """Kill the processes inside, take the limit back, and then remove the cgroup; nothing if there is none.

        A command whose time is over has got SIGTERM from `migctl run` by now, and may save its work. An empty `gpu` is
        the one on which the cgroup has a limit, if any.
        """
        what, name = _what("end", generation), str(generation)
        if name not in self._cgroups.names():
            return
        limited = self._limited_gpu((gpu,) if gpu else self._driver.uuids().values(), name) or gpu
        with _described(what):
            self._let_end(name, self._handed_over.pop(generation, None))
            self._kill(name, what)
            if limited:
                self._take_back(limited, name)
            self._cgroups.remove(name, self._deadline)

    def existing(self) -> tuple[tuple[GpuUuid | None, Generation], ...]:
        """Return the shares of which a cgroup is left; the GPU is None where it has no limit on any."""
        with _described("look for shares"):
            numbers = sorted(int(each) for each in self._cgroups.names() if _GENERATION.fullmatch(each))
        gpus = tuple(self._driver.uuids().values()) if numbers else ()
        return tuple((self._known_gpu(gpus, str(number)), Generation(number)) for number in numbers)

    def _refuse_used(self, name: str, pid: int, what: str) -> None:
        """Raise IN_USE if the process is in another share, or others are in this one."""
        members = {each: self._cgroups.members(each) for each in {*self._cgroups.names(), name}}
        other = next((each for each in members if each != name and pid in members[each]), None)
        if other is not None:
            detail = f"process {pid} is in share {other}, and a process can be in one only; start another process"
            raise DriverError(DriverErrorKind.IN_USE, what, detail=detail)
        if members[name] and pid not in members[name]:
            holders = tuple(map(self._host.describe_process, members[name]))
            detail = f"{self._cgroups.path(name)} has other processes; end them"
            raise DriverError(DriverErrorKind.IN_USE, what, detail=detail, holders=holders)

    def _let_end(self, name: str, waiting: int | None) -> None:
        until = time.monotonic() + self._grace
        while set(self._cgroups.members(name)) - {waiting} and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _kill(self, name: str, what: str) -> None:
        """Kill what is inside, again where it forks meanwhile, until nothing is left."""
        until = time.monotonic() + self._deadline
        while left := self._cgroups.members(name):
            if time.monotonic() > until:
                holders = tuple(map(self._host.describe_process, left))
                raise DriverError(DriverErrorKind.TIMEOUT, what, detail="processes do not end", holders=holders)
            self._cgroups.kill(name)
            time.sleep(_POLL_SECONDS)

    def _take_back(self, gpu: GpuUuid, name: str) -> None:
        """Take a limit back, also where the driver said that there is none: a reservation would stay for ever."""
        try:
            self._driver.set_memory_limit(gpu, self._cgroups.path(name), None)
        except DriverError as error:
            if error.kind is not DriverErrorKind.NOT_SUPPORTED:
                raise

    def _limited_gpu(self, gpus: Iterable[GpuUuid], name: str) -> GpuUuid | None:
        """Return the GPU on which a cgroup has a limit; None if it has none."""
        for gpu in gpus:
            try:
                if self._driver.memory_limit(gpu, self._cgroups.path(name)) is not None:
                    return gpu
            except DriverError as error:
                # An older driver was loaded meanwhile, or MIG mode switched on: limits went with what was before.
                if error.kind is not DriverErrorKind.NOT_SUPPORTED:
                    raise
        return None

    def _known_gpu(self, gpus: Iterable[GpuUuid], name: str) -> GpuUuid | None:
        try:
            return self._limited_gpu(gpus, name)
        except DriverError:
            return None  # a GPU does not answer

    def _not_supported(self) -> str:
        branch = self._driver.version.partition(".")[0]
        if branch.isdecimal() and int(branch) >= FIRST_DRIVER:
            return "its driver limits no memory of cgroups on it, as in MIG mode; switch MIG mode off"
        return f"driver {self._driver.version} has no memory limits of cgroups, {FIRST_DRIVER} has"


def _what(verb: str, generation: Generation) -> str:
    return f"{verb} of share {generation}"


@contextlib.contextmanager
def _described(what: str) -> Iterator[None]:
    """Raise what the kernel refuses as DriverError, with the file that it is about."""
    try:
        yield
    except ProcessLookupError as error:
        detail = f"{error.filename or 'the process'} has ended; start it again"
        raise DriverError(DriverErrorKind.NOT_FOUND, what, detail=detail) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise DriverError(_kind(error), what, detail=f"{where}{error.strerror}") from error


def _kind(error: OSError) -> DriverErrorKind:
    match error:
        case PermissionError():
            return DriverErrorKind.NO_PERMISSION
        case TimeoutError():
            return DriverErrorKind.TIMEOUT
        case _:
            return DriverErrorKind.UNKNOWN
