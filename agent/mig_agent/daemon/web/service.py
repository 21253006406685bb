"""Serves the web page at the address of the setting `web`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mig_agent.config import Settings, TcpAddress
from mig_agent.core.backoff import Backoff
from mig_agent.daemon.http_service import RETRY, HttpService
from mig_agent.daemon.httpserver import BoundedServer
from mig_agent.daemon.web.access import Access, remove_tokens
from mig_agent.engine.manager import Manager

if TYPE_CHECKING:
    from mig_agent.daemon.web.feed import Feed


class WebService(HttpService):
    """Serves the web page as soon as its address is free. Not thread-safe; use from the event loop."""

    def __init__(self, manager: Manager, settings: Settings, retry: Backoff = RETRY) -> None:
        self._manager = manager
        self.settings = settings
        """Settings of the sockets beside which tokens lie, and of who may open them; used when it begins to serve."""
        self._feed: Feed | None = None
        self._keeping: asyncio.Task[None] | None = None
        super().__init__(setting="web", what="the web page", path="/", open_server=self._open, retry=retry)

    def change_address(self, address: TcpAddress | None) -> asyncio.Future[None]:
        """Serve at this address instead of the former one, or nowhere; return the future of the first attempt."""
        tried = super().change_address(address)
        settings = self.settings
        if address is None:
            self._thread.run(lambda: remove_tokens(settings))
            return tried
        from mig_agent.daemon.web.feed import Feed  # noqa: PLC0415 -- costs only an agent that serves the page

        self._feed = Feed(self._manager)
        self._keeping = asyncio.create_task(self._feed.keep(), name="web page")
        return tried

    def close(self) -> None:
        """Stop serving, and end all streams."""
        super().close()
        if self._feed is not None:
            self._feed.end_streams()
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    def _open(self, host: str, port: int) -> BoundedServer:
        """Return a server that listens. In a thread. Raises OSError and ConfigError."""
        from mig_agent.daemon.web.application import WebApplication  # noqa: PLC0415 -- as above

        if self._feed is None:
            raise AssertionError("the feed is made before the server")
        application = WebApplication(Access.of(self.settings), self._feed)
        return BoundedServer(host, port, application, has_token=application.has_token)
