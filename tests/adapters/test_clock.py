"""The clock that tests turn by hand, and the real one."""

from __future__ import annotations

import asyncio
import time

from mig_agent.adapters.clock import SystemClock
from support.clock import VirtualClock


async def test_timers_go_off_in_order_and_at_their_moment() -> None:
    clock = VirtualClock(100.0)
    heard: list[tuple[str, float]] = []
    clock.call_later(20, lambda: heard.append(("b", clock.now())))
    clock.call_later(10, lambda: heard.append(("a", clock.now())))
    cancelled = clock.call_later(15, lambda: heard.append(("never", clock.now())))
    cancelled.cancel()
    clock.advance(9.5)
    assert heard == []
    clock.advance(100)
    assert heard == [("a", 110.0), ("b", 120.0)]
    assert clock.now() == 209.5


async def test_a_timer_may_start_another() -> None:
    clock = VirtualClock(0.0)
    heard: list[float] = []

    def start_another() -> None:
        clock.call_later(1, lambda: heard.append(clock.now()))

    clock.call_later(1, start_another)
    clock.advance(5)
    assert heard == [2.0]


async def test_short_sleeps_pass_at_once_and_long_ones_wait() -> None:
    clock = VirtualClock(0.0, patience=2.0)
    await clock.sleep(1.5)
    assert clock.now() == 1.5
    task = asyncio.get_running_loop().create_task(clock.sleep(10))
    await asyncio.sleep(0)
    assert not task.done()
    clock.advance(10)
    await task


async def test_the_real_clock_goes() -> None:
    clock = SystemClock()
    assert abs(clock.now() - time.time()) < 60
    heard = asyncio.Event()
    clock.call_later(0.001, heard.set)
    clock.call_later(0.0, heard.set).cancel()
    await asyncio.wait_for(heard.wait(), 30)
    await clock.sleep(0)
