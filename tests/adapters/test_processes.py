"""Noticing the end of a process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

import pytest

from mig_agent.adapters import processes
from mig_agent.adapters.processes import ProcessWatch, lives_since, started

PATIENCE_SECONDS = 30.0


async def waiting_process() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)


async def test_who_started_whom() -> None:
    process = await waiting_process()
    assert processes.is_below(process.pid, os.getpid())
    assert not processes.is_below(os.getpid(), os.getpid())
    assert not processes.is_below(os.getpid(), process.pid)
    assert process.pid in processes.descendants(os.getpid())
    assert processes.uid(process.pid) == os.getuid()
    process.kill()
    await process.wait()
    assert not processes.is_below(process.pid, os.getpid())
    assert processes.uid(process.pid) is None


def without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_pid: int) -> int:
        raise OSError("this kernel has no pidfd")

    monkeypatch.setattr(os, "pidfd_open", fails)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.01)


@pytest.mark.parametrize("prepare", [lambda _: None, without_pidfd], ids=["pidfd", "polling"])
async def test_the_end_of_a_process_is_told(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[pytest.MonkeyPatch], None]
) -> None:
    prepare(monkeypatch)
    process = await waiting_process()
    ended = asyncio.Event()
    watch = ProcessWatch(process.pid, started(process.pid), ended.set)
    await asyncio.sleep(0.05)
    assert not ended.is_set()
    await process.communicate(b"\n")
    await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)
    watch.close()


async def test_a_process_that_is_not_there_has_ended() -> None:
    process = await waiting_process()
    began = started(process.pid)
    await process.communicate(b"\n")
    assert started(process.pid) is None
    ended = asyncio.Event()
    ProcessWatch(process.pid, began, ended.set)
    await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)


async def test_another_process_with_the_same_pid_is_another() -> None:
    began = started(os.getpid())
    assert began is not None
    ended = asyncio.Event()
    ProcessWatch(os.getpid(), began - 1, ended.set)
    await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)


async def test_a_closed_watch_says_nothing() -> None:
    process = await waiting_process()
    ended = asyncio.Event()
    ProcessWatch(process.pid, started(process.pid), ended.set).close()
    await process.communicate(b"\n")
    await asyncio.sleep(0.05)
    assert not ended.is_set()


async def test_a_process_lives_since_a_moment_after_its_start() -> None:
    now = time.time()
    process = await waiting_process()
    assert lives_since(process.pid, time.time())
    assert lives_since(os.getppid(), now)
    assert not lives_since(process.pid, now - 3600.0)  # then the number was another one's
    await process.communicate(b"\n")
    assert not lives_since(process.pid, time.time())
