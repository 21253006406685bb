"""A long run of acquire/release pairs on one agent, with clients and agents killed, and trouble: `hack/soak.sh`.

Exit code 0 when the agent's memory, file descriptors and threads stayed flat and nothing was left behind, 1 when not, 2
for a command line that cannot be understood.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
from calls import acquire, is_broken, release, stub_on
from processes import Served, agent
from steadiness import Sample, sample_of, verdict
from trouble import Trouble

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub as AsyncStub

_MEMORY_MIB = (4000, 4000, 4000, 9000, 18_000)
"""What clients request: mostly the same, so that idle instances are reused, and sometimes one must be destroyed."""
_PAUSE_SECONDS = 0.02
_TIMEOUT_SECONDS = 120.0
_DOOMED = "doomed"
_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 20_000),
)
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})

_Answer = TypeVar("_Answer")


@dataclass
class Soak:
    """One run and its counts."""

    options: argparse.Namespace
    folder: Path
    began: float = 0.0
    """When the first agent served."""
    pairs: int = 0
    refused: int = 0
    repeated: int = 0
    clients_killed: int = 0
    agents_ended: int = 0
    trouble: Trouble = field(default_factory=Trouble)
    samples: list[Sample] = field(default_factory=list)
    killing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a client is killed: an agent that is killed meanwhile would wait a minute for it."""

    @property
    def over(self) -> bool:
        """True if enough was done."""
        limit = self.options.seconds
        return self.pairs >= self.options.pairs or (limit is not None and time.monotonic() - self.began >= limit)

    async def run(self) -> list[str]:
        """Return texts that say what is wrong at the end; empty if all is well."""
        address = f"unix://{self.folder}/agent.sock"
        clients: list[asyncio.Task[None]] = []
        async with _channel(address) as stub:
            while not clients or not all(each.done() for each in clients):
                with agent(self.options.gpus, state_dir=self.folder) as served:
                    await self._safely(partial(_status, stub))  # it listens before it serves
                    self.began = self.began or time.monotonic()
                    clients = clients or [asyncio.create_task(self._client(stub, seed)) for seed in range(self._most)]
                    await self._life(served, clients)
            await asyncio.gather(*clients)
            with agent(self.options.gpus, state_dir=self.folder):
                left = await self._left_behind(stub)
        return [*left, *self.trouble.wrong, *verdict(self.samples)]

    @property
    def _most(self) -> int:
        most: int = self.options.clients
        return most

    async def _life(self, served: Served, clients: Sequence[asyncio.Task[None]]) -> None:
        """Run one agent from its start to its end, in the middle of whatever its clients do."""
        every = self.options.restart_every
        until = self.pairs + every if every else sys.maxsize
        work = (self._watch_over(served), self._kill_clients(served), self._make_trouble(served))
        beside = [asyncio.create_task(each) for each in work]
        try:
            while self.pairs < until and not all(each.done() for each in clients):
                await asyncio.sleep(_PAUSE_SECONDS)
                for each in (*beside, *clients):
                    if each.done():
                        each.result()
            await self.killing.acquire()
        finally:
            for each in beside:
                each.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        self.killing.release()
        self._look(served)
        if not self.over:
            self.agents_ended += 1
            # Alternately with SIGKILL and with SIGTERM, which allows an orderly stop.
            os.kill(served.pid, signal.SIGKILL if self.agents_ended % 2 else signal.SIGTERM)

    async def _client(self, stub: AsyncStub, seed: int) -> None:
        draw = random.Random(seed)  # noqa: S311 -- not a secret
        while not self.over:
            name, memory = uuid.uuid4().hex, draw.choice(_MEMORY_MIB)
            granted = await self._safely(partial(acquire, stub, memory, request_id=name))
            if granted is None:
                self.refused += 1
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                await self._safely(partial(release, stub, granted))
                self.pairs += 1

    async def _left_behind(self, stub: AsyncStub) -> list[str]:
        """Return what still exists though no client uses the node any longer."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            status = await self._safely(partial(_status, stub))
            if status is None:
                raise RuntimeError("cannot go on: the status was refused")
            # A client may have been killed just before its agent was, which then waits a minute for it.
            if not status.leases or time.monotonic() > deadline:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        busy = [each for gpu in status.gpus for each in gpu.instances if each.state != pb.INSTANCE_STATE_IDLE]
        return [
            *([f"{len(status.leases)} leases were left behind"] if status.leases else []),
            *([f"{len(busy)} instances are not idle"] if busy else []),
            *([f"the ledger fails: {status.ledger_error}"] if status.ledger_error else []),
        ]

    async def _safely(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer | None:
        """Return the answer, retrying while the agent is down; None where there is no capacity."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    return None
                if not (error.code() in _AWAY or is_broken(error)) or time.monotonic() > deadline:
                    raise
            self.repeated += 1
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _watch_over(self, served: Served) -> None:
        while True:
            await asyncio.sleep(self.options.sample_seconds)
            self._look(served)

    def _look(self, served: Served) -> None:
        sample = sample_of(served.pid, self.folder, self.began, self.pairs)
        self.samples.append(sample)
        if self.options.output == "table":
            print(sample.describe(), flush=True)

    async def _make_trouble(self, served: Served) -> None:
        """Make cancelled calls, short waits and invalid input each time that `trouble_every` pairs were done."""
        every = self.options.trouble_every
        while every:
            await asyncio.sleep(_PAUSE_SECONDS)
            if self.pairs >= self.trouble.made * every:
                await self.trouble.make(served.address)

    async def _kill_clients(self, served: Served) -> None:
        """Start `migctl run` and kill it when it has its lease, which must then end by itself."""
        while self.options.kill_client_every:
            await asyncio.sleep(_PAUSE_SECONDS)
            if self.pairs >= self.clients_killed * self.options.kill_client_every:
                async with self.killing:
                    self.clients_killed += 1
                    await _kill_one(served)


async def _status(stub: AsyncStub) -> pb.StatusResponse:
    return await stub.Status(pb.StatusRequest())


async def _kill_one(served: Served) -> None:
    command = (sys.executable, "-m", "mig_agent.migctl", "--address", served.address)
    client = await asyncio.create_subprocess_exec(
        *command, "run", "--gpu-memory", "4G", "--wait", "1m", "--name", _DOOMED, "--", "sleep", "600",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with _channel(served.address) as stub:
            await _until(stub, there=True, client=client)
            client.kill()
            await _until(stub, there=False, client=None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            client.kill()
        await client.wait()


async def _until(stub: AsyncStub, *, there: bool, client: asyncio.subprocess.Process | None) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while client is None or client.returncode is None:
        status = await _status(stub)
        if any(each.holder.name == _DOOMED for each in status.leases) is there:
            return
        if time.monotonic() > deadline:
            raise RuntimeError("cannot go on: the lease of a client that was killed has not ended")
        await asyncio.sleep(_PAUSE_SECONDS)


@contextlib.asynccontextmanager
async def _channel(address: str) -> AsyncIterator[AsyncStub]:
    async with grpc.aio.insecure_channel(address, options=_CHANNEL) as channel:
        yield stub_on(channel)


def report(soak: Soak, wrong: Sequence[str]) -> dict[str, object]:
    """Return the figures of the run."""
    first, last = soak.samples[0], soak.samples[-1]
    return {
        "pairs": soak.pairs,
        "seconds": round(last.seconds, 1),
        "pairs_per_second": round(soak.pairs / last.seconds, 1),
        "clients": soak.options.clients,
        "calls_repeated": soak.repeated,
        "refused_for_want_of_capacity": soak.refused,
        "clients_killed": soak.clients_killed,
        "trouble_made": soak.trouble.made,
        "agents_killed_or_stopped": soak.agents_ended,
        "memory_mib": [round(first.memory_mib, 1), round(last.memory_mib, 1)],
        "most_memory_mib": round(max(each.memory_mib for each in soak.samples), 1),
        "files": [first.files, last.files],
        "threads": [first.threads, last.threads],
        "ledger_mib": round(last.ledger_mib, 1),
        "ledger_bytes_per_pair": round(last.ledger_mib * 2**20 / max(soak.pairs, 1)),
        "wrong": list(wrong),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the soak; the module's docstring has the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000_000, help="so many pairs (default: a million)")
    parser.add_argument("--seconds", type=float, help="at most so long (default: until the pairs are done)")
    parser.add_argument("--clients", type=int, default=8, help="so many at once (default: 8)")
    parser.add_argument("--gpus", default="a100-40gb:1,h100-80gb:1", help="simulated ones (default: %(default)s)")
    parser.add_argument(
        "--restart-every", type=int, default=0, metavar="PAIRS", help="kill or stop the agent (default: never)"
    )
    parser.add_argument(
        "--kill-client-every", type=int, default=0, metavar="PAIRS", help="kill a `migctl run` (default: never)"
    )
    parser.add_argument(
        "--trouble-every",
        type=int,
        default=0,
        metavar="PAIRS",
        help="a call that leaves, a short wait, a message and bytes that are rubbish (default: never)",
    )
    parser.add_argument(
        "--sample-seconds", type=float, default=10.0, help="between two lines of progress (default: 10)"
    )
    parser.add_argument("--state-dir", type=Path, help="kept at the end (default: a temporary folder)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.pairs < 1 or options.clients < 1:
        parser.error("cannot soak without pairs and clients: give numbers above 0")
    os.environ["MIG_AGENT_LOG_LEVEL"] = "warning"  # a line for each lease would fill the disk
    with contextlib.ExitStack() as stack:
        folder = options.state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mig-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(options, folder, trouble=Trouble(stays=not options.restart_every))
        wrong = asyncio.run(soak.run())
    figures = report(soak, wrong)
    if options.output == "json":
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name.replace('_', ' '):30} {_words(value)}")
    return 1 if wrong else 0


def _words(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    numbers = value and all(isinstance(each, (int, float)) for each in value)
    return (" -> " if numbers else "; ").join(map(str, value)) or "nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
