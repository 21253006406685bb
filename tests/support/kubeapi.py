"""The agent's own way to the API server, to a web server that says what a test tells it to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from mig_agent.adapters.kubeapi import KubeClient
from support.webserver import WebServer

PATIENCE_SECONDS = 60.0


@asynccontextmanager
async def connected(web: WebServer, folder: Path, node: str = "n1") -> AsyncIterator[KubeClient]:
    """As the agent of this node; nothing of it is left at the end."""
    api = KubeClient.connect(web.kubeconfig(folder), node)
    try:
        yield api
    finally:
        api.close()


async def until(true: Callable[[], bool]) -> None:
    """Returns when it is so; fails after a generous time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)
