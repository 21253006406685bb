"""Runs the agent without one part of its contract, to measure what that part costs: `without.py PART ARGUMENTS...`.

Such an agent is for measurements alone: it can lose leases, and gives them to callers that never had the answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mig_agent.adapters.ledger import store
from mig_agent.adapters.ledger.creation import connect
from mig_agent.adapters.transport import relay
from mig_agent.adapters.transport.peer_credentials import Peer
from mig_agent.adapters.transport.proxy_connection import ProxyConnection
from mig_agent.daemon.logs import EventLog
from mig_agent.engine.instances import Preflight
from mig_agent.frontends.grpc import encode, handlers, identity
from mig_agent.frontends.grpc.decode import request_from
from mig_agent.frontends.grpc.servicer import PartitionManagerServicer
from mig_agent.frontends.grpc.streams import request_in
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.program import run

_Patches = Mapping[tuple[object, str], Any]


async def _acquire_unconfirmed(self: Any, message: pb.AcquireRequest, context: Any) -> None:  # noqa: ANN401 -- of any class of that shape
    caller = self._caller(context)
    granted = await self._manager.acquire(request_from(request_in(message), caller), caller)
    await context.write(pb.AcquireResponse(granted=encode.granted(granted)))
    self._manager.delivered(granted.lease.id)


async def _no_check(*_arguments: object) -> None:
    return


def _nothing(*_arguments: object) -> None:
    return


def _connect_unsynchronised(path: Any, mode: str) -> Any:  # noqa: ANN401 -- of any class of that shape
    connection = connect(path, mode)
    if mode != "ro":
        connection.execute("PRAGMA synchronous = OFF")
    return connection


def _unlimited(client: Any, server: Any, buffer: Any, on_close: Any, _limits: object = None) -> ProxyConnection:  # noqa: ANN401 -- of any class of that shape
    return ProxyConnection(client, server, buffer, on_close)


def _caller_of_this_process(_address: str) -> Peer:
    return Peer(uid=os.getuid(), pid=os.getppid())


PARTS: Mapping[str, tuple[str, Callable[[], _Patches]]] = {
    "confirmation": (
        "the client confirms that it has the lease",
        lambda: {(PartitionManagerServicer, "acquire"): _acquire_unconfirmed},
    ),
    "relay": (
        "the kernel says who calls (every byte passes the relay)",
        lambda: {(each, "peer_from"): _caller_of_this_process for each in (handlers, identity)},
    ),
    "call-limits": (
        "one user's calls and memory are bounded (HTTP/2 frames are read)",
        lambda: {(relay, "ProxyConnection"): _unlimited},
    ),
    "texts": ("no text has control or invisible characters", lambda: {(handlers, "check_texts"): _nothing}),
    "process-check": (
        "an instance is leased only if no process is on it",
        lambda: {(Preflight, "before_reuse"): _no_check},
    ),
    "disk": ("a commit is on the disk before the answer", lambda: {(store, "connect"): _connect_unsynchronised}),
    "digest": (
        "a damaged ledger is noticed (digest over its rows)",
        lambda: {(store, "RunningDigest"): _FixedDigest},
    ),
    "evidence": (
        "leases can be recovered without the ledger (lease evidence)",
        lambda: {(store.Ledger, "_follow"): _nothing},
    ),
    "log": ("each lease and release is logged", lambda: {(EventLog, "__call__"): _nothing}),
}
"""What a part is for, and what replaces it."""


class _FixedDigest:
    def __init__(self, _connection: object, value: int) -> None:
        self.value = value


def without(part: str) -> None:
    """Take one part out of this process. Raises KeyError."""
    for (owner, name), replacement in PARTS[part][1]().items():
        getattr(owner, name)  # raises AttributeError if it was renamed: nothing would be measured
        setattr(owner, name, replacement)


if __name__ == "__main__":
    without(sys.argv.pop(1))
    run()
