"""Many agents in one process, each with a socket of its own: planner, messages and API, without hardware.

`python -m scale_bench.fleet FOLDER AGENTS GPUS` prints `ready` when all of them listen on FOLDER/N.sock. A number on
its standard input is how many events a second they emit from then on, all together; its end ends the process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import resource
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from placement_bench.agent import AgentCluster, Handle

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import GpuUuid, LeaseId
from mig_agent.core.planning.plan import DEFAULT_POLICY, Plan, StepTimes
from mig_agent.core.planning.planner import plan
from mig_agent.engine.callers import Caller
from mig_agent.frontends.grpc import encode, encode_plans
from mig_agent.frontends.grpc.decode import request_from
from mig_agent.frontends.grpc.handlers import abort
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1 import partition_manager_pb2_grpc as rpc

Context = grpc.aio.ServicerContext[Any, Any]
_SCHEDULER = Caller(name="bench", scheduler=True)
_PACE = StepTimes(create=0.16, destroy=0.1)
_TICK_SECONDS = 0.01
_numbers = itertools.count(1)


class Node(rpc.PartitionManagerServicer):
    """An agent without hardware: creating and destroying take no time."""

    def __init__(self, gpus: int) -> None:
        self._cluster = AgentCluster(gpus, DEFAULT_POLICY)
        self._leases: dict[str, Handle] = {}
        self._watchers: set[asyncio.Queue[Event]] = set()

    async def Plan(self, message: pb.PlanRequest, _context: Context) -> pb.PlanResponse:  # noqa: N802 -- gRPC's names
        """Plan as the agent does."""
        view = self._cluster.view
        outcomes = (plan(view, request_from(each, _SCHEDULER), DEFAULT_POLICY) for each in message.requests)
        return pb.PlanResponse(
            outcomes=[encode_plans.outcome(each, view, _PACE) for each in outcomes], revision=view.revision
        )

    async def Acquire(self, _messages: object, context: Context) -> AsyncIterator[pb.AcquireResponse]:  # noqa: N802 -- gRPC's
        """Acquire as the agent does, without the ledger and the driver."""
        message: pb.AcquireRequest = await context.read()
        request, view = request_from(message.request, _SCHEDULER), self._cluster.view
        if request.if_revision not in {None, view.revision}:
            words = f"cannot serve it at revision {request.if_revision}: the node is at {view.revision}"
            await abort(context, Refusal(reason=Reason.REVISION_CHANGED, message=words, revision=view.revision))
        outcome = plan(view, request, DEFAULT_POLICY)
        if not isinstance(outcome, Plan):
            await abort(context, outcome)
            return
        now, name = time.time(), f"lease-{next(_numbers)}"
        handle = self._leases[name] = self._cluster.carry_out(outcome, now)
        devices = [pb.Device(uuid=each.uuid, gpu=each.slot.gpu, profile=each.slot.profile.name) for each in handle]
        lease = pb.Lease(id=name, devices=devices, created_at=now, holder=encode.holder(request.holder))
        self.tell(EventKind.LEASE_GRANTED, name)
        granted = pb.Granted(lease=lease, token="0" * 64, revision=self._cluster.view.revision)
        yield pb.AcquireResponse(granted=granted)
        await context.read()  # that it was received

    async def Release(self, message: pb.ReleaseRequest, _context: Context) -> pb.ReleaseResponse:  # noqa: N802 -- gRPC's
        """Release: the instance is idle again."""
        self._cluster.end(self._leases.pop(message.lease), time.time())
        self.tell(EventKind.LEASE_ENDED, message.lease)
        return pb.ReleaseResponse()

    async def Watch(self, _message: pb.WatchRequest, _context: Context) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802 -- gRPC's
        """Stream events from now on."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._watchers.add(events)
        try:
            yield pb.WatchResponse(revision=self._cluster.view.revision)
            while True:
                event = await events.get()
                yield pb.WatchResponse(revision=event.revision, event=encode.event(event))
        finally:
            self._watchers.discard(events)

    def tell(self, kind: EventKind, lease: str) -> None:
        """Send an event to all watchers."""
        event = Event(
            kind=kind,
            at=time.time(),
            revision=self._cluster.view.revision,
            message=f"pod team-a/train-7f2c got lease {lease}: 1g.10gb on slices 0-1 of GPU 3",
            gpu=GpuUuid("GPU-3"),
            gpu_index=3,
            lease=LeaseId(lease),
            holder="pod team-a/train-7f2c",
            data={"tenant": "namespace team-a", "by": "mig-agent-scheduler", "role": "scheduler"},
        )
        for watcher in self._watchers:
            watcher.put_nowait(event)


class Stir:
    """Emits events without calls, at a rate."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self.rate = 0.0

    async def run(self) -> None:
        """Run forever."""
        chance, owed, last = random.Random(1), 0.0, time.perf_counter()  # noqa: S311 -- no secret
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.perf_counter()
            owed, last = owed + self.rate * (now - last), now
            for _ in range(int(owed)):
                chance.choice(self._nodes).tell(EventKind.LEASE_RENEWED, "lease-0")
            owed -= int(owed)


def open_many_files() -> None:
    """Raise the limit of open files as far as allowed: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(folder: Path, agents: int, gpus: int) -> None:
    """Serve until the standard input ends."""
    nodes = [Node(gpus) for _ in range(agents)]  # type: ignore[abstract] # gRPC answers the other methods
    servers = []
    for number, node in enumerate(nodes):
        server = grpc.aio.server()
        rpc.add_PartitionManagerServicer_to_server(node, server)
        server.add_insecure_port(f"unix:{folder}/{number}.sock")
        await server.start()
        servers.append(server)
    gc.freeze()  # thousands of objects that stay: the collector need not look at them again
    stir = Stir(nodes)
    stirring = asyncio.create_task(stir.run())
    print("ready", flush=True)
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        stir.rate = float(line)
    stirring.cancel()
    await asyncio.gather(*(server.stop(0) for server in servers))


if __name__ == "__main__":
    open_many_files()
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
