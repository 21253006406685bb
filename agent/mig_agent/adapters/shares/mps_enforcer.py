"""Enforcement by MPS: each share has a control daemon of its own, which limits each of its client processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mig_agent.adapters.nvml import ComputeMode, Driver
from mig_agent.adapters.shares.enforcer import Share
from mig_agent.adapters.shares.mps import PROGRAM, MpsDaemons, MpsTerms
from mig_agent.core.errors import ConfigError, DriverError, DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.core.shares import Enforcement

_FIRST_DRIVER: Final = 550
"""The first branch of the driver whose daemons let only their own user change limits."""
_VERIFIED_SECONDS = 600.0
"""Time for which a limit that was read back counts as known while its daemon runs: each command lengthens its log."""
_CLIENT_SECONDS = 2.0
"""Time that the clients may take to let go of the GPU before the server is ended under them."""
_POLL_SECONDS = 0.02


class MpsEnforcer:
    """Enforces limits by MPS, with one daemon for each share. Each process is held to the limit, not their sum."""

    enforcement = Enforcement.MPS
    overhead_mib = 128
    """The memory of the share's MPS server: 60 MiB were measured on an H100."""
    needs_process = False

    def __init__(self, folder: Path, driver: Driver, *, search_path: str, deadline_seconds: float = 10.0) -> None:
        """Keep daemons in `folder`; their programs are looked for on `search_path`, as in PATH."""
        self._driver = driver
        self._daemons: MpsDaemons | None = None
        self._unusable = ""
        try:
            self._daemons = MpsDaemons(folder, search_path=search_path, deadline_seconds=deadline_seconds)
        except ConfigError as error:
            self._unusable = f"{error.message.removeprefix('cannot ')}; {error.hint}"
        self._verified: dict[Generation, tuple[int, float]] = {}
        """The daemon of each share whose limit was read back last, and when, on the monotonic clock."""

    def why_not(self, gpu: GpuUuid) -> str:
        """Return why MPS cannot limit memory on a GPU, as a phrase with its hint; empty if it can."""
        if self._daemons is None:
            return self._unusable
        if not self._daemons.is_installed:
            return f"{PROGRAM} is not installed; it comes with the driver"
        branch = self._driver.version.partition(".")[0]
        if branch.isdigit() and int(branch) < _FIRST_DRIVER:
            return f"driver {self._driver.version} lets the holder of a share lift its limit, {_FIRST_DRIVER} does not"
        mode = self._driver.compute_mode(gpu)
        if mode is not ComputeMode.DEFAULT:
            return f"its compute mode is {mode.name}; `nvidia-smi -i {gpu} -c DEFAULT` sets it back"
        return ""

    def begin(self, share: Share) -> None:
        """Start the daemon of a share with its limits, and let its user in."""
        daemons = self._usable(f"start of the MPS daemon of share {share.generation}")
        daemons.stop(share.generation)  # what a crash left of it: no second daemon in a folder that was used
        daemons.start(share.generation, _terms(share))

    def check(self, share: Share) -> None:
        """Check that the daemon runs and has its limits. Raises DriverError, TIMEOUT if it does not answer now."""
        what = f"check of the MPS daemon of share {share.generation}"
        daemons = self._usable(what)
        daemon = daemons.daemon(share.generation)
        if daemon is None:
            raise DriverError(DriverErrorKind.NOT_FOUND, what, detail="its MPS daemon has ended")
        known, at = self._verified.get(share.generation, (0, 0.0))
        if known == daemon.pid and time.monotonic() - at < _VERIFIED_SECONDS:
            return
        if daemon.is_stopped:
            raise DriverError(DriverErrorKind.TIMEOUT, what, detail=f"its MPS daemon (pid {daemon.pid}) is stopped")
        try:
            daemons.check(share.generation, _terms(share))
        except DriverError as error:
            if error.kind is not DriverErrorKind.TIMEOUT:
                raise
            self._verified[share.generation] = (daemon.pid, time.monotonic())  # it hangs: not asked again for a while
            raise
        self._verified[share.generation] = (daemon.pid, time.monotonic())

    def environment(self, share: Share) -> Mapping[str, str]:
        """Return the variables with which a process becomes a client of the share's daemon."""
        return {} if self._daemons is None else self._daemons.environment(share.generation, _terms(share))

    def processes(self, share: Share) -> tuple[int, ...]:
        """Return the processes whose environment names the share's daemon; not those of containers."""
        return () if self._daemons is None else self._daemons.users().get(share.generation, ())

    def end(self, gpu: GpuUuid, generation: Generation) -> None:  # noqa: ARG002 -- of the protocol
        """End the clients of a share, then its daemon, and remove its folder; nothing if there is none."""
        if self._daemons is None or generation not in self._daemons.existing():
            return
        daemon = self._daemons.daemon(generation)
        if daemon is not None and not daemon.is_stopped:
            with contextlib.suppress(DriverError):  # they lose the GPU with their server
                self._end_clients(self._daemons, generation)
        self._daemons.stop(generation)
        self._verified.pop(generation, None)

    def end_process(self, generation: Generation, pid: int) -> None:
        """Have the server let go of one client; its CUDA calls fail from then on."""
        what = f"end of the MPS client {pid} of share {generation}"
        if not self._usable(what).terminate(generation, pid):
            raise DriverError(DriverErrorKind.NOT_FOUND, what, detail="it is no client of the share's MPS daemon")

    def existing(self) -> tuple[tuple[GpuUuid | None, Generation], ...]:
        """Return the shares that have a folder."""
        return () if self._daemons is None else tuple((None, each) for each in self._daemons.existing())

    @staticmethod
    def _end_clients(daemons: MpsDaemons, generation: Generation) -> None:
        """Have the server let go of each client first: one that is killed at work disturbs the others."""
        for client in daemons.clients(generation):
            daemons.terminate(generation, client)
        until = time.monotonic() + _CLIENT_SECONDS
        while daemons.clients(generation) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _usable(self, what: str) -> MpsDaemons:
        if self._daemons is None:
            raise DriverError(DriverErrorKind.NOT_SUPPORTED, what, detail=self._unusable)
        return self._daemons


def _terms(share: Share) -> MpsTerms:
    return MpsTerms(gpu=share.gpu, limit_mib=share.limit_mib, uid=share.uid, thread_percentage=share.thread_percentage)
