"""Where metrics are served, and what happens while that address is taken."""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from mig_agent.config import TcpAddress
from mig_agent.core.backoff import Backoff
from mig_agent.daemon.metrics import MetricsServer


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("tested", "Whether it is read.", registry=registry).inc()
    server = MetricsServer(registry, retry=Backoff(first=0.02, longest=0.05))
    yield server
    server.close()


async def read(url: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 -- our own
            text: str = answer.read().decode()
        return text

    return await asyncio.to_thread(get)


async def until_served(server: MetricsServer) -> None:
    served = asyncio.Event()
    server.report_to(lambda words: None if words else served.set())
    await served.wait()


def address_of(listener: socket.socket) -> TcpAddress:
    return TcpAddress("127.0.0.1", listener.getsockname()[1])


async def test_they_are_served_at_once_where_the_address_is_free(server: MetricsServer) -> None:
    await server.serve_at(TcpAddress("127.0.0.1", 0))
    assert server.shown == server.url
    assert "tested_total 1.0" in await read(server.url)


async def test_a_taken_port_is_reported_with_its_holder_until_it_is_free(
    server: MetricsServer, taken: socket.socket
) -> None:
    address = address_of(taken)
    await server.serve_at(address)
    first = server.shown
    assert first.startswith(f"off (cannot listen on {address}: port {address.port} is taken by ")
    assert f"(pid {os.getpid()})" in first or "this agent itself" in first
    reports: list[str] = []
    server.report_to(reports.append)
    assert reports == [first]
    taken.close()
    await asyncio.wait_for(until_served(server), 30)
    assert "tested_total" in await read(server.url)


async def test_an_address_that_this_machine_does_not_have_is_reported(server: MetricsServer) -> None:
    await server.serve_at(TcpAddress("192.0.2.1", 7481))
    assert server.shown.startswith("off (cannot listen on 192.0.2.1:7481: ")


async def test_the_address_can_change_also_to_the_same_port_and_to_none(
    server: MetricsServer, taken: socket.socket
) -> None:
    await server.serve_at(TcpAddress("127.0.0.1", 0))
    port = int(server.url.rpartition(":")[2].removesuffix("/metrics"))
    await server.serve_at(TcpAddress("0.0.0.0", port))  # noqa: S104 -- the same port, which the former server must leave
    assert server.url == f"http://0.0.0.0:{port}/metrics"
    await server.serve_at(address_of(taken))
    assert server.shown.startswith("off (")
    await server.serve_at(None)
    assert server.shown == "off"
    await server.serve_at(TcpAddress("127.0.0.1", 0))
    assert "tested_total" in await read(server.url)
