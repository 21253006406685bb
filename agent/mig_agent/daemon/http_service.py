"""Serves something over HTTP beside the API: metrics, and the web page.

That it cannot be served is never a reason to refuse GPUs: another program may use the address, or a second agent. It is
reported, and tried again until the address is free.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import structlog

from mig_agent.adapters.port_holder import port_holder
from mig_agent.adapters.threads import CallThread
from mig_agent.config import TcpAddress
from mig_agent.core.backoff import Backoff
from mig_agent.core.errors import ConfigError
from mig_agent.daemon.httpserver import BoundedServer

RETRY = Backoff(first=1.0, longest=60.0)
"""The pauses between two attempts to listen, in seconds."""
_FIRST_ATTEMPT_SECONDS = 2.0
"""Longest time that the start waits for the first attempt: looking up a host name may take longer."""

_log = structlog.get_logger(__name__)


class HttpService:
    """Serves at an address, as soon as it is free. Not thread-safe; use from the event loop."""

    def __init__(
        self, *, setting: str, what: str, path: str, open_server: Callable[[str, int], BoundedServer], retry: Backoff
    ) -> None:
        """Serve `what` at `path`: "metrics" at "/metrics". `setting` is the one with the address.

        `open_server` is called in a thread with host and port, and raises OSError or ConfigError if it cannot listen.
        """
        self._setting, self._what, self._path = setting, what, path
        self._open_server = open_server
        self._retry = retry
        self._thread = CallThread(f"{setting}-address")
        self._server: BoundedServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._report: Callable[[str], None] = _ignore
        self._problem = ""
        self.url = ""
        """Address at which it is read, such as `http://127.0.0.1:7481/metrics`; empty while it is not served."""

    @property
    def shown(self) -> str:
        """Address at which it is read, or `off` and why."""
        return self.url or (f"off ({self._problem})" if self._problem else "off")

    def report_to(self, report: Callable[[str], None]) -> None:
        """Call the function with what is wrong, now and at each change; with no words when nothing is."""
        self._report = report
        report(f"off ({self._problem})" if self._problem else "")

    async def serve_at(self, address: TcpAddress | None) -> None:
        """Serve at this address instead of the former one, or nowhere. Return after the first attempt."""
        tried = self.change_address(address)
        await asyncio.wait({tried}, timeout=_FIRST_ATTEMPT_SECONDS)

    def change_address(self, address: TcpAddress | None) -> asyncio.Future[None]:
        """Do as `serve_at` without waiting; return the future of the first attempt."""
        self.close()
        self._set_problem("")
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if address is None:
            tried.set_result(None)
        else:
            self._serving = asyncio.create_task(self._serve(address, tried), name=self._setting)
        return tried

    def close(self) -> None:
        """Stop serving, and trying to."""
        if self._serving is not None:
            self._serving.cancel()
            self._serving = None
        server, self._server, self.url = self._server, None, ""
        if server is not None:
            self._thread.run(server.end)  # it takes a moment, and the next attempt comes after it

    async def _serve(self, address: TcpAddress, tried: asyncio.Future[None]) -> None:
        failures = 0
        while True:
            opening = self._thread.run(lambda: _open(address, self._open_server))
            try:
                server, why = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_opened)
                raise
            if server is not None:
                break
            failures += 1
            self._failed(address, why)
            if not tried.done():
                tried.set_result(None)
            await asyncio.sleep(self._retry.pause(failures))
        self._server = server
        self.url = f"http://{address.host}:{server.server_port}{self._path}"
        server.begin(self._setting)
        if failures:
            _log.info(f"serving {self._what}", address=self.url)
        self._set_problem("")
        if not tried.done():
            tried.set_result(None)

    def _failed(self, address: TcpAddress, why: str) -> None:
        problem = f"cannot listen on {address}: {why}"
        if problem != self._problem:
            hint = f"set {self._setting} to another address, or to off"
            _log.warning(f"cannot serve {self._what} on {address}: {why}; it is tried again until it works", hint=hint)
        self._set_problem(problem)

    def _set_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._report(f"off ({problem})" if problem else "")


def _open(address: TcpAddress, open_server: Callable[[str, int], BoundedServer]) -> tuple[BoundedServer | None, str]:
    """Return a server that listens, or None and why it cannot. Blocks."""
    try:
        return open_server(address.host.removeprefix("[").removesuffix("]"), address.port), ""
    except ConfigError as error:
        return None, error.message
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return None, error.strerror or str(error)
        holder = port_holder(address.port)
        return None, f"port {address.port} is taken by {holder or 'another program'}"


def _close_opened(opening: asyncio.Future[tuple[BoundedServer | None, str]]) -> None:
    """Close a server that was opened when nothing wanted it any more."""
    if not opening.cancelled() and opening.exception() is None:
        server, _ = opening.result()
        if server is not None:
            server.server_close()


def _ignore(_words: str) -> None:
    """Report nothing."""
