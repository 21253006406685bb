"""Streams on which no request has come: the oldest of a user makes place for its newest, and nobody else's."""

from __future__ import annotations

import asyncio

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.frontends.grpc.call_limits import OpeningStreams

MOST = 3


async def test_oldest_stream_of_the_same_user_is_evicted() -> None:
    opening = OpeningStreams(lambda _who: MOST)
    never = asyncio.Event()

    async def wait(who: int) -> None:
        async with opening.waiting(who):
            await never.wait()

    others = [asyncio.create_task(wait(2)) for _ in range(MOST)]
    mine = [asyncio.create_task(wait(1)) for _ in range(MOST + 2)]
    done, _ = await asyncio.wait(mine[:2], timeout=30)
    assert done == set(mine[:2])
    for each in mine[:2]:
        error = each.exception()
        assert isinstance(error, RefusedError)
        assert error.refusal.reason is Reason.QUEUE_FULL
        assert "cannot wait longer for a request" in error.refusal.message
    assert not any(each.done() for each in (*others, *mine[2:]))
    never.set()
    await asyncio.gather(*others, *mine[2:])
    assert not len(opening)


async def test_user_without_streams_is_forgotten() -> None:
    opening = OpeningStreams(lambda _who: MOST)
    with pytest.raises(ZeroDivisionError):
        async with opening.waiting("host"):
            raise ZeroDivisionError
    assert not len(opening)
