"""Reloads renewed certificates: checks before each TCP connection is relayed, and every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.transport.tls import Certificates, Renewal, TlsFiles
from mig_agent.config import Settings
from mig_agent.engine.tasks import Tasks

CHECK_SECONDS = 10.0
"""Interval of checks without connections, so that clients of a removed authority are disconnected in time."""
_CHECK_TIMEOUT_SECONDS = 5.0
"""Time limit of a check, after which a connection goes on without it: a file server may not answer."""

_log = structlog.get_logger(__name__)


def configured_certificates(settings: Settings) -> Certificates | None:
    """Return the certificates for TCP, or None where there are none. Raises ConfigError if they cannot be used."""
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None or client_ca is None:
        return None
    return Certificates(TlsFiles(cert=cert, key=key, client_ca=client_ca))


class CertificateReloader:
    """Reloads certificates when their files change. Not thread-safe; use from the event loop."""

    def __init__(self, certificates: Certificates, on_revoked: Callable[[], None]) -> None:
        """`on_revoked` is called when an authority was removed, before any connection is made under the new files."""
        self._certificates = certificates
        self._on_revoked = on_revoked
        self._tasks = Tasks()
        self._thread = CallThread("certificates")
        self._checking: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._report: Callable[[Renewal], None] = _write

    def report_to(self, report: Callable[[Renewal], None]) -> None:
        """Report each change of the files to this function from now on, instead of to the log."""
        self._report = report

    def start(self) -> None:
        """Start checking at intervals."""
        self._timer = self._tasks.keep("certificates", self._check_regularly)

    def stop(self) -> None:
        """Stop checking; harmless if stopped."""
        for task in (self._timer, self._checking):
            if task is not None:
                task.cancel()
        self._thread.close()

    async def check(self) -> None:
        """Return when the files were checked, or do not answer in time.

        The check began after this call, so it sees the files as of the call; several callers may share one.
        """
        former = self._checking
        if former is not None and not former.done():
            await asyncio.wait({former}, timeout=_CHECK_TIMEOUT_SECONDS)
        if self._checking is None or self._checking.done():
            self._checking = self._tasks.spawn("a check of the certificates", self._check())
        await asyncio.wait({self._checking}, timeout=_CHECK_TIMEOUT_SECONDS)

    async def _check(self) -> None:
        renewal = await self._thread.run(self._certificates.reload)
        if renewal is None:
            return
        if renewal.revokes:
            self._on_revoked()
        self._report(renewal)

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()


def _write(renewal: Renewal) -> None:
    """Log a change while no other function is set."""
    if renewal.taken:
        _log.info(renewal.words)
    else:
        _log.error(renewal.words)
