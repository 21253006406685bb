"""Processes that run an engine through every kind of request and are killed at one crash point of it.

A server imports everything once and forks for each run, since importing takes far longer than running.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mig_agent.adapters.clock import SystemClock
from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.core.model import Want
from mig_agent.engine.results import Granted
from support.engine import ADMIN, ANYBODY, Node, start

TESTS = Path(__file__).resolve().parent.parent
GPUS = "a100-40gb,a30"
ANSWERS = "answers.jsonl"


class Story:
    """What happens in one run; what was begun and answered is written down as it comes."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._node = node
        self._file = (folder / ANSWERS).open("a", encoding="utf-8")

    def note(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    async def acquire(self, name: str, *wants: str | Want) -> Granted:
        self.note(begun=name, wants=wants)
        granted = await self._node.acquire(*wants, request_id=name)
        devices = [[each.gpu_index, each.gpu_instance_id, each.uuid] for each in granted.devices]
        self.note(answered=name, lease=granted.lease.id, token=granted.token, devices=devices)
        return granted

    async def release(self, name: str, granted: Granted) -> None:
        self.note(releasing=name)
        await self._node.manager.release(granted.lease.id, granted.token, ANYBODY)
        self.note(released=name)

    async def tell(self) -> None:
        first = await self.acquire("create", "1g.5gb")
        await self.release("create", first)
        again = await self.acquire("reuse", "1g.5gb")
        several = await self.acquire("several", "2g.10gb", "1g.6gb", "1g.5gb")
        await self.release("reuse", again)
        await self.release("several", several)
        large = await self.acquire("destroy", "4g.20gb", "1g.6gb")
        await self._node.manager.reclaim((), ADMIN)
        await self._node.manager.cordon("1", True, "example", ADMIN)
        await self._node.manager.renew(large.lease.id, large.token, 1000.0, ANYBODY)
        await self.release("destroy", large)
        await self._node.manager.close()


async def _run(folder: Path, point: str, count: int) -> None:
    node = await start(folder, clock=SystemClock())
    FAILPOINTS.arm(point, count)
    await Story(node, folder).tell()


def serve() -> None:
    """Reads a folder, a point and a number from each line, runs that in a child, and answers how it ended."""
    for line in sys.stdin:
        folder, point, count = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                asyncio.run(_run(Path(folder), point, count))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


@dataclass
class CrashServer:
    """The server as its tests see it."""

    process: subprocess.Popen[str]

    def run(self, folder: Path, point: str, count: int) -> int:
        """The exit code of one run, -9 for one that was killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(folder), point, count]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def crash_server() -> Iterator[CrashServer]:
    """A server that ends with the block."""
    script = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from support.crashing import serve; serve()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield CrashServer(process)
        assert process.stdin is not None
        process.stdin.close()
