"""The protocol of Acquire as a client speaks it without the library: a request, and `received` after `granted`."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub, PartitionManagerStub

RECEIVED = pb.AcquireRequest(received=pb.Received())


def asking(request: pb.Request) -> Iterator[pb.AcquireRequest]:
    """All that a client says which never confirms its lease."""
    return iter([pb.AcquireRequest(request=request)])


def confirming(stub: PartitionManagerStub, request: pb.Request, timeout: float) -> Iterator[pb.AcquireResponse]:
    """Ask for a lease, confirm it when it comes, and yield all that is answered. Nothing is sent before it is read."""
    requests: SimpleQueue[pb.AcquireRequest | None] = SimpleQueue()
    requests.put(pb.AcquireRequest(request=request))
    try:
        for answer in stub.Acquire(iter(requests.get, None), timeout=timeout):
            if answer.HasField("granted"):
                requests.put(RECEIVED)
            yield answer
    finally:
        requests.put(None)


def granted(stub: PartitionManagerStub, request: pb.Request, timeout: float) -> pb.Granted:
    """Take a lease and confirm it."""
    *_, last = confirming(stub, request, timeout)
    assert last.granted.token, "a stream that ended without a lease"
    return last.granted


async def granted_on(stub: PartitionManagerAsyncStub, request: pb.Request, timeout: float) -> pb.Granted:  # noqa: ASYNC109 -- gRPC's
    """As `granted`, on an event loop."""
    found = pb.Granted()
    call = stub.Acquire(timeout=timeout)
    await call.write(pb.AcquireRequest(request=request))
    async for answer in call:
        if answer.HasField("granted"):
            found = answer.granted
            await call.write(RECEIVED)
    assert found.lease.id, "a stream that ended without a lease"
    return found
