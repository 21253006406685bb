"""Checks that every call is answered, and that unconfirmed leases end: `hack/delivery.sh`.

Two storms on an agent of its own, with pairs of acquire and release beside them:

- Acquire calls that end at a random moment before their client has confirmed the lease: cancelled, out of time, their
  connection closed, or their process killed. After the grace period no lease may be left.
- Requests with short waits on a full node, some of whose clients do not read for a while. Each must be answered.

Exit code 0 when no lease was left and every call was answered, 1 when not, 2 for a command line that cannot be
understood.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import grpc
from calls import acquire, lease_pair, release, stub_on
from processes import Served, agent

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1 import partition_manager_pb2_grpc as rpc

if TYPE_CHECKING:
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub as AsyncStub

_GRACE_SECONDS = 60.0
"""How long an agent keeps a lease that is not confirmed."""
_LEAVE_WITHIN = 0.06
"""The most seconds from a request until its client disconnects."""
_LONGEST_WAIT = 0.2
_NOT_READING = 0.1
"""The share of waiting requests whose clients do not read for a while."""
_ANSWER_SECONDS = 60.0
"""Seconds after which a call counts as never answered."""
_AT_ONCE = 48
_MOST_IDLE = 150
_IN_A_CHILD = 8
_CHANNEL = (("grpc.use_local_subchannel_pool", 1),)
_DRAW = random.Random(20_261_122)  # noqa: S311 -- not a secret

Leaving = Callable[[Served], Awaitable[int]]
"""Begins calls and ends them before they are confirmed; returns how many."""


def _wanted(memory: str, wait_seconds: float | None = None) -> pb.Request:
    return pb.Request(wants=[pb.Want(memory=memory)], request_id=uuid.uuid4().hex, wait_seconds=wait_seconds)


async def _cancelled(served: Served) -> int:
    """Cancel calls in the application, on an open connection, from an event loop."""
    async with _stub(served.address) as stub:

        async def one() -> None:
            call = stub.Acquire()
            await call.write(pb.AcquireRequest(request=_wanted("4G")))
            reading = asyncio.ensure_future(call.read())
            await asyncio.sleep(_DRAW.uniform(0, _LEAVE_WITHIN))
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        await asyncio.gather(*(one() for _ in range(_IN_A_CHILD)))
    return _IN_A_CHILD


async def _out_of_time(served: Served) -> int:
    async with _stub(served.address) as stub:

        async def one() -> None:
            call = stub.Acquire(timeout=_DRAW.uniform(0.001, _LEAVE_WITHIN))
            with contextlib.suppress(grpc.RpcError, asyncio.CancelledError, asyncio.InvalidStateError):
                await call.write(pb.AcquireRequest(request=_wanted("4G")))
                while await call.read() is not grpc.aio.EOF:
                    pass

        await asyncio.gather(*(one() for _ in range(_IN_A_CHILD)))
    return _IN_A_CHILD


async def _closed(served: Served) -> int:
    """Close the connection in the middle of its calls."""
    async with _stub(served.address) as stub:
        calls = [stub.Acquire() for _ in range(_IN_A_CHILD)]
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            for call in calls:
                await call.write(pb.AcquireRequest(request=_wanted("4G")))
        await asyncio.sleep(_DRAW.uniform(0, _LEAVE_WITHIN))
    return _IN_A_CHILD


async def _cancelled_in_threads(served: Served) -> int:
    """Cancel calls in the application, with the synchronous API."""

    def one(stub: rpc.PartitionManagerStub, after: float) -> None:
        requests: SimpleQueue[pb.AcquireRequest | None] = SimpleQueue()
        requests.put(pb.AcquireRequest(request=_wanted("4G")))
        call = stub.Acquire(iter(requests.get, None))
        time.sleep(after)
        call.cancel()
        requests.put(None)

    def all_of_them() -> None:
        with grpc.insecure_channel(served.address, options=_CHANNEL) as channel:
            stub = rpc.PartitionManagerStub(channel)
            threads = [
                threading.Thread(target=one, args=(stub, _DRAW.uniform(0, _LEAVE_WITHIN))) for _ in range(_IN_A_CHILD)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()

    await asyncio.to_thread(all_of_them)
    return _IN_A_CHILD


async def _killed(served: Served) -> int:
    """Kill a process with SIGKILL at any moment after its request."""
    command = (sys.executable, __file__, "--ask", served.address)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        if child.stdout is not None:
            await child.stdout.readline()
        await asyncio.sleep(_DRAW.uniform(0, _LEAVE_WITHIN))
    finally:
        child.kill()
        await child.wait()
    return _IN_A_CHILD


async def _ask(address: str) -> None:
    """Request leases and read the answers, but never confirm: the process that is killed."""
    async with _stub(address) as stub:
        await stub.Status(pb.StatusRequest())
        calls = [stub.Acquire() for _ in range(_IN_A_CHILD)]
        print("asking", flush=True)
        for call in calls:
            await call.write(pb.AcquireRequest(request=_wanted("4G")))
        await asyncio.gather(*(call.read() for call in calls))
        await asyncio.sleep(_ANSWER_SECONDS)


_WAYS: tuple[tuple[str, Leaving, int], ...] = (
    ("cancelled, asyncio", _cancelled, 3),
    ("cancelled, threads", _cancelled_in_threads, 3),
    ("out of time", _out_of_time, 3),
    ("connection closed", _closed, 2),
    ("killed", _killed, 1),
)
"""The ways to leave, each with the weight with which it is drawn."""


async def leave(calls: int, gpus: str) -> dict[str, object]:
    """Run the storm of calls that end before they are confirmed; return what it has left."""
    done: Counter[str] = Counter()
    async with _serving(gpus) as (served, _):
        async with _stub(served.address) as stub, _load(served):

            async def some(ways: Sequence[tuple[str, Leaving, int]]) -> None:
                while done.total() < calls:
                    name, way, _ = _DRAW.choices(ways, [each[2] for each in ways])[0]
                    done[name] += await way(served)

            # Idle instances: answers come soon, so whether the client receives one is decided within milliseconds.
            for granted in [await acquire(stub, 4000) for _ in range(_MOST_IDLE)]:
                await release(stub, granted)
            await asyncio.gather(*(some(_WAYS) for _ in range(4)))
            in_grace = len((await stub.Status(pb.StatusRequest())).leases)
        async with _stub(served.address) as stub:
            await asyncio.sleep(_GRACE_SECONDS + 2)
            left = len((await stub.Status(pb.StatusRequest())).leases)
            ended = await stub.Events(pb.EventsRequest(limit=1000))
            undelivered = sum(each.data["reason"].text == "undelivered" for each in ended.events)
    return {
        "calls that left before they confirmed": done.total(),
        "how": dict(done),
        "leases of theirs when the last had left": in_grace,
        "ended as undelivered (of the last 1000 events)": undelivered,
        "leases left after the time of grace": left,
    }


async def killed_migctl(times: int, gpus: str) -> dict[str, object]:
    """Kill `migctl request` at random moments: only a lease that was printed may stay."""
    printed = set()
    async with _serving(gpus) as (served, _):
        command = [sys.executable, "-m", "mig_agent.migctl", "--address", served.address, "request", "--gpu-memory"]
        began = time.perf_counter()
        asked = await asyncio.create_subprocess_exec(*command, "4G", stdout=asyncio.subprocess.DEVNULL)
        await asked.wait()
        whole = time.perf_counter() - began

        async def one() -> None:
            asked = await asyncio.create_subprocess_exec(
                *command, "4G", "-o", "json", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            await asyncio.sleep(_DRAW.uniform(0.5, 1.2) * whole)
            with contextlib.suppress(ProcessLookupError):
                asked.kill()
            said, _ = await asked.communicate()
            with contextlib.suppress(json.JSONDecodeError):
                printed.add(json.loads(said)["lease"])

        for _ in range(0, times, 2):
            await asyncio.gather(one(), one())
        await asyncio.sleep(_GRACE_SECONDS + 2)
        async with _stub(served.address) as stub:
            leases = {each.id for each in (await stub.Status(pb.StatusRequest())).leases}
    # One lease is that of the run that measured how long a whole one takes.
    return {
        "migctl request killed": times,
        "printed": len(printed),
        "leases left that nobody was told of": len(leases - printed) - 1,
    }


async def wait(requests: int) -> dict[str, object]:
    """Run the storm of requests with short waits on a full node; return how they were answered."""
    answers: Counter[str] = Counter()
    async with _serving("a100-40gb:1") as (served, folder):
        async with _stub(served.address) as stub:
            await acquire(stub, 39_000)
            numbers = iter(range(requests))
            await asyncio.gather(*(_wait_on(served.address, numbers, answers) for _ in range(_AT_ONCE)))
            await stub.Status(pb.StatusRequest())
        log = (folder / "agent.log").read_text(errors="replace")
    return {
        "requests that waited up to 200 ms": answers.total(),
        "answers": {name: count for name, count in answers.items() if name != "none"},
        "without an answer": answers["none"],
        "failures in the agent's log": log.count("TOO_MANY_OPERATIONS") + log.count("Traceback"),
    }


async def _wait_on(address: str, numbers: Iterator[int], answers: Counter[str]) -> None:
    async with _stub(address) as stub:
        for _ in numbers:
            call = stub.Acquire()
            await call.write(pb.AcquireRequest(request=_wanted("4G", wait_seconds=_DRAW.uniform(0, _LONGEST_WAIT))))
            if _DRAW.random() < _NOT_READING:
                await asyncio.sleep(_DRAW.uniform(0, 2 * _LONGEST_WAIT))  # it does not read
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            except TimeoutError:
                answers["none"] += 1
                call.cancel()
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1
            else:
                answers["OK"] += 1


@contextlib.asynccontextmanager
async def _serving(gpus: str) -> AsyncIterator[tuple[Served, Path]]:
    """Run an agent; yield it and its folder once it serves."""
    with tempfile.TemporaryDirectory(prefix="mig-delivery-") as folder, agent(gpus, state_dir=Path(folder)) as served:
        async with _stub(served.address) as stub:
            while True:  # it listens before it serves
                try:
                    await stub.Status(pb.StatusRequest())
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
        yield served, Path(folder)


@contextlib.asynccontextmanager
async def _load(served: Served) -> AsyncIterator[None]:
    """Run pairs of acquire and release beside the storm."""
    async with grpc.aio.insecure_channel(served.address, options=_CHANNEL) as channel:
        pair = lease_pair(channel, 9000)
        over = False

        async def go_on() -> None:
            while not over:
                with contextlib.suppress(grpc.aio.AioRpcError):  # no capacity
                    await pair()

        tasks = [asyncio.create_task(go_on()) for _ in range(4)]
        try:
            yield
        finally:
            over = True
            await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def _stub(address: str) -> AsyncIterator[AsyncStub]:
    async with grpc.aio.insecure_channel(address, options=_CHANNEL) as channel:
        yield stub_on(channel)


def main(arguments: Sequence[str]) -> int:
    """Run the storms; the module's docstring has the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaving", type=int, default=1000, help="calls that leave (default: %(default)s)")
    parser.add_argument("--migctl", type=int, default=40, help="`migctl request` killed (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=20_000, help="requests that wait (default: %(default)s)")
    parser.add_argument("--gpus", default="h100-80gb:64", help="simulated ones (default: %(default)s)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--ask", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ask:
        asyncio.run(_ask(options.ask))
        return 0
    if min(options.leaving, options.migctl, options.waiting) < 0:
        parser.error("cannot make less than no call: give numbers from 0")
    os.environ["MIG_AGENT_LOG_LEVEL"] = "warning"
    figures: dict[str, object] = {}
    if options.waiting:
        figures |= asyncio.run(wait(options.waiting))
    if options.leaving:
        figures |= asyncio.run(leave(options.leaving, options.gpus))
    if options.migctl:
        figures |= asyncio.run(killed_migctl(options.migctl, options.gpus))
    if options.output == "json":
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:50} {value}")
    wrong = ("without an answer", "failures in the agent's log")
    left = ("leases left after the time of grace", "leases left that nobody was told of")
    return 1 if any(figures.get(name) for name in (*wrong, *left)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
