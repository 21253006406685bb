"""The DRA driver of the node: its sockets, the claims that the kubelet has prepared, and what is published."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from mig_agent.adapters.cdi import CdiFolder
from mig_agent.adapters.kubeapi import KubeClient
from mig_agent.adapters.kubelet import DriverSockets, KubeletError, KubeletPaths
from mig_agent.core.backoff import Backoff
from mig_agent.core.dra.names import DRIVER
from mig_agent.engine.manager import Manager
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.dra.claims import Claims
from mig_agent.frontends.kubernetes.dra.publisher import Publisher
from mig_agent.frontends.kubernetes.dra.service import DriverService

_CLOSING_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = (0.5, 15.0)
"""The first and the longest pause before the sockets are tried again."""
_PART: Final = "DRA sockets"
_LOG = structlog.get_logger(__name__)


class KubeletDriver:
    """Serves claims of this node. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        manager: Manager,
        api: KubeClient,
        cdi: CdiFolder,
        paths: KubeletPaths,
        node: str,
        set_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`set_ready` is called with True once the kubelet has registered the driver."""
        self._tasks = Tasks()
        self._manager = manager
        self._serving: asyncio.Task[None] | None = None
        self._set_ready = set_ready
        self._service = DriverService(Claims(manager, api, cdi, node))
        self._publisher = Publisher(manager, api, node, api.follow_pods, self._tasks)
        self._sockets = DriverSockets(paths, DRIVER, self._registered)

    def start(self) -> None:
        """Serve the kubelet as soon as its folders are there, and publish from then on."""
        self._serving = self._tasks.keep("serve the kubelet", self._serve)

    async def close(self) -> None:
        """Stop serving; running pods keep their devices."""
        if self._serving is not None:
            self._serving.cancel()
        self._publisher.stop()
        await self._sockets.stop(_CLOSING_SECONDS)
        await self._tasks.end(_CLOSING_SECONDS)

    async def _serve(self) -> None:
        failures = 0
        while True:
            try:
                await self._sockets.start(self._service.methods())
            except KubeletError as error:
                await self._sockets.stop()
                failures += 1
                self._manager.report_problem(_PART, str(error))
                _LOG.warning(str(error), hint="it is tried again by itself")
                await asyncio.sleep(Backoff(*_RETRY_SECONDS).pause(failures))
            else:
                self._manager.report_problem(_PART, "")
                self._publisher.start()
                return

    def _registered(self, error: str) -> None:
        if error:
            _LOG.error(f"cannot register with the kubelet as DRA driver {DRIVER}: {error}")
        else:
            _LOG.info("registered with the kubelet", driver=DRIVER)
            self._publisher.refresh()
        self._tasks.spawn("readiness of the driver", self._report(not error))

    async def _report(self, ready: bool) -> None:  # noqa: FBT001 -- as set_ready takes it
        await self._set_ready(ready)
