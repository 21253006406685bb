"""The API served over real Unix sockets by the real manager over simulated GPUs, all on the test's own event loop."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from mig_agent.adapters.grpc_errors import TRAILER
from mig_agent.config import Settings
from mig_agent.engine.callers import Role
from mig_agent.frontends.grpc.handlers import SERVICE, method_handlers
from mig_agent.frontends.grpc.identity import Roles
from mig_agent.frontends.grpc.servicer import PartitionManagerServicer
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.acquire import granted_on
from support.engine import Node, engine

if TYPE_CHECKING:  # it is in the stubs alone
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub

TRUSTING = Roles(unidentified=Role.SCHEDULER)
"""With no relay in between nobody is known, and what requests say of their holders counts."""
TIMEOUT = 60.0
"""Seconds for any call in a test."""


@dataclass
class Service:
    """A served node, and a stub for each of its sockets."""

    node: Node
    folder: Path
    users: PartitionManagerAsyncStub
    admins: PartitionManagerAsyncStub
    servicers: tuple[PartitionManagerServicer, PartitionManagerServicer]
    servers: tuple[grpc.aio.Server, grpc.aio.Server]

    @property
    def address(self) -> str:
        """Of the users' socket."""
        return f"unix://{self.folder}/agent.sock"

    async def acquire(self, *, by: PartitionManagerAsyncStub | None = None, **request: Any) -> pb.Granted:
        """A lease, confirmed."""
        return await granted_on(by or self.users, ask(**request), TIMEOUT)


@contextlib.asynccontextmanager
async def service(folder: Path, there: str = "a100-40gb", /, **changes: Any) -> AsyncIterator[Service]:
    """A served node, with its engine's files in the folder."""
    async with contextlib.AsyncExitStack() as stack:
        # Paths of sockets have to be short.
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mig-")))
        node = await stack.enter_async_context(engine(folder, there, **changes))
        stubs, servicers, servers = [], [], []
        for name, admin in (("agent.sock", False), ("admin.sock", True)):
            servicer = PartitionManagerServicer(node.manager, admin=admin, roles=TRUSTING)
            server = grpc.aio.server()
            server.add_generic_rpc_handlers(
                (
                    grpc.method_handlers_generic_handler(
                        SERVICE.full_name, dict(method_handlers(servicer, Settings().max_calls))
                    ),
                )
            )
            server.add_insecure_port(f"unix:{sockets}/{name}")
            await server.start()
            stack.push_async_callback(server.stop, None)
            channel = grpc.aio.insecure_channel(
                f"unix:{sockets}/{name}", options=(("grpc.use_local_subchannel_pool", 1),)
            )
            stack.push_async_callback(channel.close)
            stub: Any = PartitionManagerStub(channel)
            stubs.append(stub)
            servicers.append(servicer)
            servers.append(server)
        yield Service(
            node=node,
            folder=sockets,
            users=stubs[0],
            admins=stubs[1],
            servicers=(servicers[0], servicers[1]),
            servers=(servers[0], servers[1]),
        )


def ask(*wants: pb.Want, memory: str = "", profile: str = "", **fields: Any) -> pb.Request:
    """A request for one device, or for these."""
    chosen = list(wants)
    if memory:
        chosen.append(pb.Want(memory=memory))
    if profile:
        chosen.append(pb.Want(profile=profile))
    fields.setdefault("holder", pb.Holder(name="alice", tenant="team-a"))
    return pb.Request(wants=chosen, **fields)


def detail_of(error: grpc.RpcError) -> pb.RefusalDetail:
    """The typed details of a refusal; fails where there are none."""
    assert isinstance(error, grpc.aio.AioRpcError)
    for key, value in error.trailing_metadata() or ():
        if key == TRAILER:
            assert isinstance(value, bytes)
            return pb.RefusalDetail.FromString(value)
    raise AssertionError(f"no typed details in {error!r}")
