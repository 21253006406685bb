"""Looks for renewed certificates: before each connection over TCP is passed on, and every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.transport.tls import Certificates, Renewal
from mig_agent.engine.tasks import Tasks

LOOK_SECONDS = 10.0
"""Between two looks where nobody connects: who is not to be known any more does not stay for want of others."""
_PATIENCE_SECONDS = 5.0
"""For a look, before a connection goes on without it: files may lie on a server that does not answer."""

_log = structlog.get_logger(__name__)


class Renewing:
    """Loads certificates again when their files change. Not thread-safe; use from the event loop."""

    def __init__(self, certificates: Certificates, on_revoked: Callable[[], None]) -> None:
        """`on_revoked`: an authority is gone; called before any connection is made under the new ones."""
        self._certificates = certificates
        self._on_revoked = on_revoked
        self._tasks = Tasks()
        self._thread = CallThread("certificates")
        self._looking: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._report: Callable[[Renewal], None] = _write

    def report_to(self, report: Callable[[Renewal], None]) -> None:
        """Report each change of the files to this function from now on; until then the log has it."""
        self._report = report

    def start(self) -> None:
        """Looks from now on, now and then."""
        self._timer = self._tasks.keep("certificates", self._now_and_then)

    def stop(self) -> None:
        """Looks no more; harmless when it does not."""
        for task in (self._timer, self._looking):
            if task is not None:
                task.cancel()
        self._thread.close()

    async def look(self) -> None:
        """Returns when the files were looked at, or do not answer.

        The look began after this was called, so it has seen what was there before; several may wait for the same one.
        """
        former = self._looking
        if former is not None and not former.done():
            await asyncio.wait({former}, timeout=_PATIENCE_SECONDS)
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.spawn("a look at the certificates", self._look())
        await asyncio.wait({self._looking}, timeout=_PATIENCE_SECONDS)

    async def _look(self) -> None:
        renewal = await self._thread.run(self._certificates.look)
        if renewal is None:
            return
        if renewal.revokes:
            self._on_revoked()
        self._report(renewal)

    async def _now_and_then(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()


def _write(renewal: Renewal) -> None:
    """While nobody else listens."""
    if renewal.taken:
        _log.info(renewal.words)
    else:
        _log.error(renewal.words)
