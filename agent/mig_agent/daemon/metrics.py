"""Metrics over HTTP, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from mig_agent.config import Settings, TcpAddress
from mig_agent.core.errors import ConfigError
from mig_agent.daemon.httpserver import BoundedServer

_log = structlog.get_logger(__name__)


def serve_metrics(settings: Settings, registry: CollectorRegistry) -> tuple[str, Callable[[], None]]:
    """Serve the registry in threads; return its URL (`http://127.0.0.1:9400/metrics`) and a function that stops it.

    Raises ConfigError if the address is not available. Only the default address may be unavailable: that another
    exporter or a second simulated agent uses it is no reason to refuse GPUs.
    """
    address = settings.metrics
    if address is None:
        return "", _nothing
    try:
        server = BoundedServer(_host(address), address.port, make_wsgi_app(registry))
    except OSError as error:
        words = f"cannot serve metrics on {address}: {error.strerror or error}"
        if "metrics" in settings.given:
            raise ConfigError(words, "give another address with --metrics, or --metrics off") from error
        _log.warning(words, hint="give another address with --metrics, or --metrics off")
        return "", _nothing

    server.begin("metrics")
    return f"http://{address.host}:{server.server_port}/metrics", server.end


def _host(address: TcpAddress) -> str:
    return address.host.removeprefix("[").removesuffix("]")


def _nothing() -> None:
    """Stop nothing."""
