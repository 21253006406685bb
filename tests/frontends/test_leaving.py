"""A client that goes away at any moment of Hold: nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from mig_agent.adapters.transport.peer_credentials import Peer, bound_name, shown_by_grpc
from mig_agent.adapters.transport.proxy_connection import ConnectionEnd, ConnectionEnds, Ending
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.frontends.grpc.servicer import PartitionManagerServicer
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.engine import Node, engine
from support.service import TRUSTING, ask


class Connection:
    """The server's end of a call, as far as the servicer uses it."""

    def __init__(self, peer: str = "") -> None:
        self.written: list[object] = []
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    async def write(self, message: object) -> None:
        await asyncio.sleep(0)
        self.written.append(message)


async def gone(node: Node) -> None:
    """Returns when nothing is done for anybody any more and the clients' time to be back is over."""
    acquisitions = node.manager._parts.acquirer
    await node.until(lambda: not acquisitions._jobs)
    await node.quiet()
    node.clock.advance(6)
    await node.until(lambda: not node.leases)
    assert {each.state.value for each in node.instances()} <= {"idle"}


@pytest.mark.parametrize("profile", ["1g.5gb", "7g.40gb"], ids=["small", "destroys idle ones"])
async def test_client_that_disconnects_at_any_moment_leaks_nothing(tmp_path: Path, profile: str) -> None:
    moments = random.Random(7)  # noqa: S311 -- not a secret
    async with engine(tmp_path, "a100-40gb") as node:
        servicer = PartitionManagerServicer(node.manager, admin=False, roles=TRUSTING)
        for steps in range(40):
            for each in [await node.acquire("1g.5gb") for _ in range(3)]:
                await node.release(each)
            message = pb.HoldRequest(request=ask(profile=profile))
            call = asyncio.create_task(servicer.hold(message, cast("Any", Connection())))
            if steps % 2:
                for _ in range(steps):
                    await asyncio.sleep(0)
            else:  # also while a thread is at work
                await asyncio.sleep(moments.random() * 0.01)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await gone(node)


async def left(node: Node, fates: ConnectionEnds, peer: str, fate: ConnectionEnd | None) -> None:
    """A lease was held over this connection, its stream has ended, and then its connection, if at all."""
    servicer = PartitionManagerServicer(node.manager, admin=False, roles=TRUSTING, connection_ends=fates)
    connection = Connection(peer)
    held = asyncio.create_task(servicer.hold(pb.HoldRequest(request=ask(memory="4G")), cast("Any", connection)))
    await node.until(lambda: connection.written)
    held.cancel()
    await asyncio.sleep(0)
    if fate is not None:
        fate.set(Ending.BROKEN)
    with contextlib.suppress(asyncio.CancelledError):
        await held
    await node.quiet()


@pytest.mark.parametrize(
    ("ending", "seconds"),
    [(None, 0), (Ending.HUNG_UP, 5), (Ending.BROKEN, 60)],
    ids=["on purpose", "hung up", "broken"],
)
async def test_grace_period_of_a_held_lease_depends_on_the_connection_end(
    tmp_path: Path, ending: Ending | None, seconds: float
) -> None:
    """Also where the end of the connection is seen after that of the stream."""
    peer = shown_by_grpc(bound_name(Peer(uid=None, pid=None, host="203.0.113.7")))
    for late in (False, True) if ending is Ending.BROKEN else (False,):
        async with engine(tmp_path / str(late), "a100-40gb") as node:
            fates, fate = ConnectionEnds(), ConnectionEnd()
            fates.begin(peer, fate)
            if ending is not None and not late:
                fate.set(ending)
            await left(node, fates, peer, fate if late else None)
            if seconds:
                assert node.leases
                node.clock.advance(seconds - 0.5)
                await node.quiet()
                assert node.leases
                node.clock.advance(0.5)
            await node.until(lambda: not node.leases)


async def test_client_that_reconnects_at_once_gets_its_lease(tmp_path: Path) -> None:
    """Its connection broke while it was served. It may hear `cancelled` first, which says to ask again."""
    async with engine(tmp_path, "a100-40gb") as node:
        servicer = PartitionManagerServicer(node.manager, admin=False, roles=TRUSTING)
        message = pb.HoldRequest(request=ask(memory="4G", request_id="mine"))
        call = asyncio.create_task(servicer.hold(message, cast("Any", Connection())))
        await node.until(lambda: node.manager._parts.acquirer._jobs)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        while True:
            connection = Connection()
            held = asyncio.create_task(servicer.hold(message, cast("Any", connection)))
            await node.until(lambda: held.done() or connection.written)  # noqa: B023 -- called at once
            if not held.done():
                break
            refused = held.exception()
            assert isinstance(refused, RefusedError)
            assert refused.refusal.reason is Reason.CANCELLED
        await node.quiet()
        node.clock.advance(600)
        await node.quiet()
        assert len(node.leases) == 1
        held.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await held
        await gone(node)
