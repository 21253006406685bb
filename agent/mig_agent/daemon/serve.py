"""`mig-agent serve` as a process: its signals, limits, exit code, and last log lines."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NoReturn

import structlog

from mig_agent.adapters.filelock import LockedError
from mig_agent.config import Settings
from mig_agent.config.load import Reading
from mig_agent.core.errors import DriverError, LedgerError, RefusedError, UsageError
from mig_agent.daemon import logs
from mig_agent.daemon.agent import Agent, start_agent
from mig_agent.daemon.hardware import CannotServeError
from mig_agent.daemon.logs import Log
from mig_agent.daemon.reload import Reloader
from mig_agent.daemon.sd_notify import keep_alive, notify, reloading
from mig_agent.daemon.service_status import ServiceStatus

_UMASK = 0o022
CLEAN = 0
FAILED = 1
_BY_SIGNAL = 128
_SAME_SIGNAL_SECONDS = 0.5
"""Window in which a repeated signal counts as one: timeout(1), and a shell on Ctrl-C, signal both process and group."""

_LAST_LINES_SECONDS = 1.0
"""Time for the log to take the last lines; a pipe without a reader does not keep the process longer."""
_GPUS_SECONDS = 30.0
"""Interval of checks for a GPU on a node that has none."""

_log = structlog.get_logger(__name__)


def serve(settings: Settings, read: Callable[[], Reading]) -> NoReturn:
    """Serve until SIGTERM or SIGINT, and end the process. SIGHUP has `read` read the configuration again.

    It ends without waiting for threads: one may hang in the driver for good. Nor is the event loop closed: when an
    exception has left it, calls of gRPC are in progress, and cancelling their tasks crashed the interpreter.
    """
    _confine()
    log = logs.configure(settings)
    code = FAILED
    runner = asyncio.Runner()
    try:
        code = runner.run(_Process(settings, read, log).run())
    except BaseExceptionGroup as group:
        _log_unexpected(group.exceptions[0])
    except Exception as error:  # noqa: BLE001 -- the last line of defence: one line, and the exit code
        _log_unexpected(error)
    finally:
        _exit(log, code)


def _exit(log: Log, code: int) -> NoReturn:
    """Write what the log takes within a moment, and end the process."""
    log.close(_LAST_LINES_SECONDS)
    os._exit(code)


def _confine() -> None:
    """Set the umask and disable core dumps, whatever the parent process set."""
    # The code names the modes of files and folders, and narrows them itself where only the agent may read.
    os.umask(_UMASK)
    # A core would hold the key of the tokens and that of the certificate. The kernel also passes this limit to programs
    # that cores are piped to, and systemd-coredump then stores nothing.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Instead, each thread's place in the code: systemd's watchdog sends SIGABRT when the event loop is blocked.
    faulthandler.enable()


def _enable_garbage_collection() -> None:
    """Enable the garbage collector without objects of the start: scanning all of them would be a pause each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _log_unexpected(error: BaseException) -> None:
    _log.critical("the agent failed in a way that it did not expect", error=f"{type(error).__name__}: {error}")
    _log.debug("where it failed", exc_info=error)


class _Process:
    """One run: starts the agent, waits for a signal, stops it."""

    def __init__(self, settings: Settings, read: Callable[[], Reading], log: Log) -> None:
        self._settings = settings
        self._read = read
        self._log = log
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()
        self._main: asyncio.Task[int] | None = None
        self._started = False
        self._asked_at = 0.0
        self._code = CLEAN

    async def run(self) -> int:
        """Run the agent and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        async with asyncio.TaskGroup() as group:
            self._main = group.create_task(self._serve(group), name="serve")
        return CLEAN if self._main.cancelled() else self._main.result()

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stop.is_set():
            if now - self._asked_at < _SAME_SIGNAL_SECONDS:
                return
            _log.warning("stopping at once", signal=number.name)
            _exit(self._log, _BY_SIGNAL + number)
        _log.info("stopping", signal=number.name)
        self._asked_at = now
        self._stop.set()
        if not self._started and self._main is not None:
            self._main.cancel()

    async def _reload_when_asked(self, agent: Agent, status: ServiceStatus) -> None:
        """Read the configuration again after each SIGHUP; several at once count as one."""
        reloader = Reloader(agent, self._read, self._log)
        while True:
            await self._reload.wait()
            self._reload.clear()
            notify(reloading())
            try:
                await reloader.reload()
            except Exception as error:  # noqa: BLE001 -- a mistake in here must not end the agent
                _log.exception("cannot read the configuration again", error=str(error))
            status.ready()

    def _on_outdated(self) -> None:
        """Stop with a failure after the driver was replaced: only a restarted container gets the new driver library."""
        _log.error("stopping: the driver was replaced, and only a new container has its new library")
        self._code = FAILED
        self._stop.set()

    async def _watch_for_gpus(self, agent: Agent) -> None:
        """Wait until a node without a GPU has one, then stop with a failure so that the container restarts."""
        while agent.hardware.absent:
            await asyncio.sleep(_GPUS_SECONDS)
            if agent.hardware.host.has_nvidia_gpu():
                _log.error("stopping: there is a GPU now, and only a new container has its driver's library")
                self._code = FAILED
                self._stop.set()
                return

    async def _serve(self, group: asyncio.TaskGroup) -> int:
        try:
            async with AsyncExitStack() as stack:
                agent = await start_agent(self._settings, stack, lambda: self._log.dropped)
                self._started = True
                if self._settings.kubernetes:
                    agent.manager.on_outdated.append(self._on_outdated)
                status = ServiceStatus(agent.manager)
                status.ready()
                _log.info("serving", **agent.facts(), seconds=round(time.monotonic() - self._began, 3))
                _enable_garbage_collection()
                running = [
                    group.create_task(each, name=name)
                    for name, each in {
                        "watchdog": keep_alive(),
                        "service status": status.keep(),
                        "reload": self._reload_when_asked(agent, status),
                        "watch for GPUs": self._watch_for_gpus(agent),
                    }.items()
                ]
                await self._stop.wait()
                notify("STOPPING=1\nSTATUS=stopping: the step in progress ends, leases stay")
                for each in running:
                    each.cancel()
                await agent.stop()
        except (UsageError, LockedError, CannotServeError) as error:
            _log.error(error.message, hint=error.hint)
            return FAILED
        except RefusedError as error:
            _log.error(error.refusal.message, hint=error.refusal.hint)
            return FAILED
        except (DriverError, LedgerError) as error:
            _log.error(str(error))  # which starts with "cannot"
            return FAILED
        _log.info("stopped")
        return self._code
