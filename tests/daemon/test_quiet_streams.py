"""A lease that is held and a watch with nothing to tell stand as long as their client lives, however quiet they are.

gRPC ends connections whose client pings more often than it is allowed to: with a client that pings each minute that
takes three minutes to show, so here the client and the server both count faster, the one as much as the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from mig_agent.client import Client, ClientError, channels
from mig_agent.client.types import Event
from mig_agent.config import Settings, UnixAddress
from mig_agent.daemon import servers
from mig_agent.frontends.grpc.handlers import method_handlers
from mig_agent.frontends.grpc.servicer import PartitionManagerServicer
from support.agent import eventually, short_folder
from support.engine import Node, engine
from support.service import TRUSTING

FASTER = 200
PING = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0))
"""How a PING that is no answer begins (RFC 9113, 6.7)."""
PINGS = 8
"""A server that minds them has ended the connection after three."""
COUNTED_FASTER = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")
UNHURRIED = ("grpc.http2.max_pings_without_data", 0)
"""Otherwise a client with nothing to say pings but once a minute, after the first few."""
Options = Sequence[tuple[str, int]]


def faster(options: Options) -> Options:
    return [(name, value // FASTER if name in COUNTED_FASTER else value) for name, value in options]


class Line:
    """Between a client and the agent: counts connections, and pings of the client."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.connections = self.pings = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        from_agent, to_agent = await asyncio.open_unix_connection(self._target)
        await asyncio.gather(self._pass_on(reader, to_agent, count=True), self._pass_on(from_agent, writer))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, count: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                self.pings += data.count(PING) if count else 0
                sink.write(data)
        sink.close()


@contextlib.asynccontextmanager
async def served(folder: Path, node: Node) -> AsyncIterator[Line]:
    """The node behind the agent's own sockets, relays and options."""
    settings = Settings(
        state_dir=folder,
        listen=(UnixAddress(folder / "agent.sock"),),
        admin_listen=UnixAddress(folder / "admin.sock"),
    )
    there = servers.Servers(settings)
    try:
        await there.start()
        users, admins = (
            method_handlers(
                PartitionManagerServicer(
                    node.manager, admin=admin, roles=TRUSTING, connection_ends=there.connection_ends
                ),
                settings.max_calls,
            )
            for admin in (False, True)
        )
        await there.open(users, admins)
        line = Line(folder / "agent.sock")
        async with await asyncio.start_unix_server(line.accept, folder / "line"):
            yield line
    finally:
        await there.stop(0.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def read_to_the_end_of(lease: str, events: Iterator[Event], told: list[str]) -> None:
    """Until the event that the lease has ended, or the end of the stream."""
    with contextlib.suppress(ClientError):
        for event in events:
            if event.lease == lease:
                told.append(event.kind)
                return


def hold_and_watch(folder: Path, line: Line) -> None:
    """As people do."""
    with Client(f"unix://{folder}/line") as client:
        revision = client.status().revision
        lease = client.lease(gpu_memory="4G")
        events = client.watch(revision)
        while next(events).kind != "lease-granted":
            pass
        told: list[str] = []
        watching = threading.Thread(target=read_to_the_end_of, args=(lease.id, events, told))
        watching.start()
        before = line.pings
        eventually(lambda: line.pings >= before + PINGS or line.connections > 1, "it pings")
        assert line.connections == 1
        assert watching.is_alive()
        assert lease.lost is None
        lease.release()
        watching.join()
        assert told == ["lease-ended"]


async def test_quiet_streams_outlive_the_limits_on_pings(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_OPTIONS", faster(servers._OPTIONS))
    monkeypatch.setattr(channels, "_OPTIONS", (*faster(channels._OPTIONS), UNHURRIED))
    async with engine(tmp_path, "a100-40gb") as node, served(folder, node) as line:
        await asyncio.to_thread(hold_and_watch, folder, line)
        assert not node.leases
