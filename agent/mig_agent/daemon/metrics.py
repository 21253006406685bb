"""Metrics over HTTP, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, make_wsgi_app

from mig_agent.core.backoff import Backoff
from mig_agent.daemon.http_service import RETRY, HttpService
from mig_agent.daemon.httpserver import BoundedServer


class MetricsServer(HttpService):
    """Serves the metrics at an address, as soon as it is free. Not thread-safe; use from the event loop."""

    def __init__(self, registry: CollectorRegistry, retry: Backoff = RETRY) -> None:
        application = make_wsgi_app(registry)

        def open_server(host: str, port: int) -> BoundedServer:
            return BoundedServer(host, port, application)

        super().__init__(setting="metrics", what="metrics", path="/metrics", open_server=open_server, retry=retry)
