"""Measures the agent's budgets, each against its baseline in the same run: `hack/bench/run.sh [PART...] [-o json]`.

A machine that is busy with something else makes every figure here worse: run it alone. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
from calls import acquire, echo_pair, latencies, lease_pair, release, stub_on, throughput
from figures import Figure, as_json, median, table
from planning import microseconds_of_plan
from processes import Served, agent, echo

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub as AsyncStub

_MIB = 1 << 20
_CREATE_SECONDS = 0.5
"""Long enough that the simulator's own Python work does not blur the question: do creations run in parallel?"""


def plan() -> list[Figure]:
    """Measure the planner alone."""
    return [
        Figure(what=f"plan on {gpus} GPUs, p50", measured=microseconds_of_plan(gpus), unit="us", budget=budget)
        for gpus, budget in ((8, 50.0), (64, 300.0))
    ]


def pair(rounds: int = 10, times: int = 60) -> list[Figure]:
    """Measure acquire and release of an idle match, alternating with two echoes so that both see the same machine."""
    return asyncio.run(_pair(rounds, times))


async def _pair(rounds: int, times: int) -> list[Figure]:
    ours: list[float] = []
    bare: list[float] = []
    with agent("h100-80gb:2") as served, echo() as echoing:
        async with grpc.aio.insecure_channel(served.address) as one, grpc.aio.insecure_channel(echoing.address) as two:
            lease, plain = lease_pair(one), echo_pair(two)
            await latencies(lease, times)
            await latencies(plain, times)
            for _ in range(rounds):
                ours += await latencies(lease, times)
                bare += await latencies(plain, times)
    return [
        Figure(
            what="acquire + release of an idle match, p50",
            measured=median(ours) * 1e3,
            baseline=median(bare) * 1e3,
            baseline_is="two bare echoes",
            unit="ms",
            budget=2.5,
        )
    ]


def crowd(rounds: int = 5, clients: int = 32, times: int = 20) -> list[Figure]:
    """Measure 32 clients at once."""
    return asyncio.run(_crowd(rounds, clients, times))


async def _crowd(rounds: int, clients: int, times: int) -> list[Figure]:
    ours: list[float] = []
    bare: list[float] = []
    # Seven small instances on each GPU: every client finds an idle match.
    with agent("h100-80gb:5") as served, echo() as echoing:
        async with grpc.aio.insecure_channel(served.address) as one, grpc.aio.insecure_channel(echoing.address) as two:
            lease, plain = lease_pair(one), echo_pair(two)
            stub = stub_on(one)
            first = [await acquire(stub, 4000) for _ in range(clients)]
            for granted in first:
                await release(stub, granted)
            await throughput(plain, clients, times)
            for _ in range(rounds):
                ours.append(await throughput(lease, clients, times))
                bare.append(await throughput(plain, clients, times))
    return [
        Figure(
            what=f"{clients} clients at once on idle matches",
            measured=median(ours),
            baseline=median(bare),
            baseline_is="bare echoes",
            unit="pairs/s",
            budget=0.5,
            at_least=True,
        )
    ]


def creations(rounds: int = 3) -> list[Figure]:
    """Measure eight creations on eight GPUs at once against one creation, and Status meanwhile."""
    return asyncio.run(_creations(rounds))


async def _creations(rounds: int) -> list[Figure]:
    single: list[float] = []
    eight: list[float] = []
    quiet: list[float] = []
    meanwhile: list[float] = []
    with agent("h100-80gb:8", create_seconds=_CREATE_SECONDS) as served:
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = stub_on(channel)
            taken: list[pb.Granted] = []
            for _ in range(rounds):
                began = time.perf_counter()
                taken.append(await acquire(stub, 4000, ("0",)))
                single.append(time.perf_counter() - began)
                quiet += await latencies(lambda: _status(stub), 30)
                began = time.perf_counter()
                busy = asyncio.gather(*(acquire(stub, 9900, (str(gpu),)) for gpu in range(8)))
                meanwhile += await latencies(lambda: _status(stub), 30)
                taken += await busy
                eight.append(time.perf_counter() - began)
    return [
        Figure(
            what="8 creations on 8 GPUs at once",
            measured=median(eight),
            baseline=median(single),
            baseline_is="one creation",
            unit="s",
            budget=1.3,
        ),
        Figure(
            what="status while instances are being created, p50",
            measured=median(meanwhile) * 1e3,
            baseline=median(quiet) * 1e3,
            baseline_is="status at rest",
            unit="ms",
            budget=2.0,
        ),
    ]


async def _status(stub: AsyncStub) -> None:
    await stub.Status(pb.StatusRequest())


def start(rounds: int = 5) -> list[Figure]:
    """Measure the time from the start of the process to its first answer, with 50 leases to recover."""
    ours: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory(prefix="mig-bench-") as folder:
        with agent("h100-80gb:8", state_dir=Path(folder)) as served:
            asyncio.run(_take(served, 50))
        for _ in range(rounds):
            with agent("h100-80gb:8", state_dir=Path(folder)) as served:
                ours.append(served.seconds_to_ready)
            bare.append(_seconds_of([sys.executable, "-c", "import grpc, structlog"]))
    return [
        Figure(
            what="start to serving, 8 GPUs, 50 leases",
            measured=median(ours),
            baseline=median(bare),
            baseline_is="import grpc, structlog",
            unit="s",
            budget=4.0,
        )
    ]


async def _take(served: Served, leases: int) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = stub_on(channel)
        for _ in range(leases):
            await acquire(stub, 4000)


def memory(clients: int = 1000) -> list[Figure]:
    """Measure resident memory at rest, and what a thousand clients add."""
    return asyncio.run(_memory(clients))


async def _memory(clients: int) -> list[Figure]:
    with agent("h100-80gb:8") as served:
        process = psutil.Process(served.pid)
        await _take(served, 10)
        at_rest = process.memory_info().rss / _MIB
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(served.address, options) for _ in range(clients)]
        try:
            stubs = [stub_on(channel) for channel in channels]
            for first in range(0, clients, 50):
                await asyncio.gather(*(_status(stub) for stub in stubs[first : first + 50]))
            crowded = process.memory_info().rss / _MIB
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))
    return [
        Figure(what="memory of the agent at rest", measured=at_rest, unit="MiB", budget=70.0),
        Figure(what=f"memory that {clients} clients add", measured=crowded - at_rest, unit="MiB", budget=60.0),
    ]


def command_line(rounds: int = 10) -> list[Figure]:
    """Measure `migctl status` as a whole process."""
    ours: list[float] = []
    bare: list[float] = []
    with agent("h100-80gb:2") as served:
        status = [sys.executable, "-m", "mig_agent.migctl", "--address", served.address, "status"]
        for _ in range(rounds):
            ours.append(_seconds_of(status))
            bare.append(_seconds_of([sys.executable, "-c", "import grpc"]))
    return [
        Figure(
            what="`migctl status` as a whole process",
            measured=median(ours) * 1e3,
            baseline=median(bare) * 1e3,
            baseline_is="import grpc",
            unit="ms",
            budget=2.0,
        )
    ]


def _seconds_of(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


PARTS: dict[str, Callable[[], list[Figure]]] = {
    "plan": plan,
    "pair": pair,
    "crowd": crowd,
    "creations": creations,
    "start": start,
    "memory": memory,
    "command-line": command_line,
}


def main(arguments: Sequence[str]) -> int:
    """Return 0 when every budget is met, 1 when one is not, 2 for a command line that cannot be understood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help=f"what to measure: {', '.join(PARTS)}; all by default")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    chosen = parser.parse_args(arguments)
    unknown = [part for part in chosen.part if part not in PARTS]
    if unknown:
        parser.error(f"cannot measure {', '.join(unknown)}: there is {', '.join(PARTS)}")
    figures = [figure for part in chosen.part or PARTS for figure in PARTS[part]()]
    print(as_json(figures) if chosen.output == "json" else table(figures))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
