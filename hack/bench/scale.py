"""One scheduler over many agents: `hack/bench/scale.sh [--agents 1000] [-o json]`.

The agents are the planner and the API without hardware, all of them in one process, each with a socket of its own; the
scheduler is the Python client on one event loop in another process, this one. They share the machine, so a decision
takes what both of them need for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from placement_bench.results import Table
from scale_bench.choosing import Everywhere, Pods, Watching
from scale_bench.fleet import open_many_files

from mig_agent.client import AsyncClient

_MIB = 1 << 20
_TOGETHER = 50
"""How many agents are connected to at the same time."""
_AT_ONCE = 16
_SETTLE_SECONDS = 1.0
_QUICKER = 40
"""How many times as many decisions are measured with the quicker method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Measurements of how quickly pods are placed with one method."""

    how: str
    at_once: int
    per_second: float
    p50_ms: float
    cpu_ms: float
    """Processor time of the scheduler alone for one decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FanIn:
    """The cost of receiving this many events per second."""

    offered: int
    heard: float
    cpu_percent: float
    """Percent of one core, for the scheduler alone."""
    delay_p50_ms: float | None
    delay_p99_ms: float | None


@dataclass(slots=True, kw_only=True)
class Found:
    """All that was measured."""

    connect_seconds: float = 0.0
    connections_mib: float = 0.0
    learn_seconds: float = 0.0
    cache_mib: float = 0.0
    scheduler_mib: float = 0.0
    decisions: list[Decisions] = field(default_factory=list)
    fan_in: list[FanIn] = field(default_factory=list)


class Fleet:
    """The process of the agents."""

    def __init__(self, folder: Path, agents: int, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._agents, self._process = folder, agents, process

    def addresses(self) -> list[str]:
        """Return the addresses of all agents."""
        return [f"unix://{self._folder}/{number}.sock" for number in range(self._agents)]

    def stir(self, events_a_second: float) -> None:
        """Emit this many events per second from now on, over all agents."""
        if self._process.stdin is None:
            raise RuntimeError("a fleet without a standard input")
        self._process.stdin.write(f"{events_a_second}\n".encode())
        self._process.stdin.flush()


@contextlib.contextmanager
def fleet(agents: int, gpus: int) -> Iterator[Fleet]:
    """Run the agents' process until the end."""
    with tempfile.TemporaryDirectory(prefix="mig-") as folder:
        command = [sys.executable, "-m", "scale_bench.fleet", folder, str(agents), str(gpus)]
        here = str(Path(__file__).resolve().parent)
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": here}
        ) as process:
            try:
                if process.stdout is None or process.stdout.readline() != b"ready\n":
                    raise SystemExit("cannot measure: the agents do not start")
                yield Fleet(Path(folder), agents, process)
            finally:
                process.kill()


class Bench:
    """Runs the measurements in this process."""

    def __init__(self, there: Fleet) -> None:
        self._fleet = there
        self._own = psutil.Process()
        self._agents: list[AsyncClient] = []
        self.found = Found()

    def _memory(self) -> float:
        gc.collect()
        return float(self._own.memory_info().rss) / _MIB

    async def connect(self) -> None:
        """Connect a client to each agent, and make one call."""
        before, began = self._memory(), time.perf_counter()
        self._agents = [AsyncClient(address) for address in self._fleet.addresses()]
        for first in range(0, len(self._agents), _TOGETHER):
            some = self._agents[first : first + _TOGETHER]
            await asyncio.gather(*(agent.plan(gpu_memory="5G") for agent in some))
        self.found.connect_seconds = time.perf_counter() - began
        self.found.connections_mib = self._memory() - before

    async def everywhere(self, rounds: int) -> None:
        """Measure decisions for which every node is asked for every pod."""
        pods = Pods(Everywhere(self._agents), 2 * len(self._agents))
        await pods.place(2, 1)
        await self._decide(pods, "all nodes are asked", rounds, 1)
        await pods.end()

    async def watching(self, rounds: int) -> None:
        """Measure decisions from plans that are kept up to date by watching."""
        before, began = self._memory(), time.perf_counter()
        chooser = Watching(self._agents)
        await chooser.start()
        self.found.learn_seconds = time.perf_counter() - began
        self.found.cache_mib = self._memory() - before
        pods = Pods(chooser, 2 * len(self._agents))
        await pods.place(50, _AT_ONCE)
        for at_once in (1, _AT_ONCE):
            await self._decide(pods, "plans are kept by Watch", rounds, at_once)
        await pods.end()
        await chooser.close()

    async def fan_in(self, rates: Sequence[int], seconds: float) -> None:
        """Measure the cost of receiving all events."""
        watched = Watching(self._agents)
        await watched.start(planning=False)
        for rate in rates:
            await asyncio.sleep(_SETTLE_SECONDS)
            self._fleet.stir(rate)
            await asyncio.sleep(_SETTLE_SECONDS)
            watched.forget()
            busy, began = time.process_time(), time.perf_counter()
            await asyncio.sleep(seconds)
            taken, busy = time.perf_counter() - began, time.process_time() - busy
            late = statistics.quantiles(watched.delays, n=100) if len(watched.delays) > 1 else None
            self.found.fan_in.append(
                FanIn(
                    offered=rate,
                    heard=len(watched.delays) / taken,
                    cpu_percent=100 * busy / taken,
                    delay_p50_ms=1e3 * late[49] if late else None,
                    delay_p99_ms=1e3 * late[98] if late else None,
                )
            )
            self._fleet.stir(0)
        self.found.scheduler_mib = self._memory()
        await watched.close()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(agent.close() for agent in self._agents))

    async def _decide(self, pods: Pods, how: str, count: int, at_once: int) -> None:
        pods.took.clear()
        busy = time.process_time()
        seconds = await pods.place(count, at_once)
        self.found.decisions.append(
            Decisions(
                how=how,
                at_once=at_once,
                per_second=count / seconds,
                p50_ms=1e3 * statistics.median(pods.took),
                cpu_ms=1e3 * (time.process_time() - busy) / count,
            )
        )


async def measure(there: Fleet, rounds: int, seconds: float, rates: Sequence[int]) -> Found:
    """Run all measurements."""
    bench = Bench(there)
    await bench.connect()
    try:
        await bench.everywhere(rounds)
        await bench.watching(_QUICKER * rounds)
        await bench.fan_in(rates, seconds)
    finally:
        await bench.close()
    return bench.found


def tables(found: Found, agents: int, gpus: int) -> list[Table]:
    """Return tables for people."""
    return [
        Table(
            f"Decisions over {agents} nodes of {gpus} GPUs",
            ("how", "pods at once", "a second", "p50, ms", "the scheduler's own processor time, ms"),
            tuple(
                (each.how, str(each.at_once), _number(each.per_second), _number(each.p50_ms), _number(each.cpu_ms))
                for each in found.decisions
            ),
        ),
        Table(
            f"Watch of {agents} nodes",
            (
                "events a second",
                "heard a second",
                "the scheduler's processor time, % of a core",
                "delay p50, ms",
                "p99, ms",
            ),
            tuple(
                (
                    str(each.offered),
                    _number(each.heard),
                    _number(each.cpu_percent),
                    _number(each.delay_p50_ms),
                    _number(each.delay_p99_ms),
                )
                for each in found.fan_in
            ),
        ),
        Table(
            "What it takes",
            ("what", "measured"),
            (
                ("connecting to all nodes, one call each", f"{_number(found.connect_seconds)} s"),
                ("memory of the connections", f"{_number(found.connections_mib)} MiB"),
                ("opening all streams and learning all plans", f"{_number(found.learn_seconds)} s"),
                ("memory of streams and plans", f"{_number(found.cache_mib)} MiB"),
                ("memory of the scheduler in the end", f"{_number(found.scheduler_mib)} MiB"),
            ),
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench/scale.sh", description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8, help="of each agent")
    parser.add_argument(
        "--rounds", type=int, default=25, help=f"decisions that ask all nodes; {_QUICKER} times as many others"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each rate of events")
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 100, 1000, 3000], help="events a second")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    chosen = parser.parse_args(arguments)
    open_many_files()
    with fleet(chosen.agents, chosen.gpus) as there:
        found = asyncio.run(measure(there, chosen.rounds, chosen.seconds, chosen.rates))
    if chosen.output == "json":
        print(json.dumps({"agents": chosen.agents, "gpus": chosen.gpus, **asdict(found)}, indent=2))
    else:
        print("\n\n".join(map(str, tables(found, chosen.agents, chosen.gpus))))
    return 0


def _number(value: float | None) -> str:
    """Format a number with three figures; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 -- see above


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
