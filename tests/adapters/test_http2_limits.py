"""Frames are counted however they are cut, and calls beyond a limit wait until others have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mig_agent.adapters.transport.http2_limits import _MOST_EARLY_BYTES, Http2Limits, LimitError, Limits, Usages
from support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
)

START = PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK)


def begin(stream: int, size: int = 0) -> bytes:
    body = frame(DATA, END_STREAM, stream, bytes(size)) if size else b""
    return frame(HEADERS, END_HEADERS, stream, b"\x82") + body


class Counted:
    """Usages with small limits; `caught_up` is answered by hand."""

    def __init__(self, calls: int = 3, unseen_calls: int = 1000, request_bytes: int = 1000) -> None:
        self.answers: asyncio.Queue[bool] = asyncio.Queue()
        self.usages = Usages(
            Limits(calls=calls, unseen_calls=unseen_calls, request_bytes=request_bytes), self.answers.get
        )
        self.broken: list[str] = []

    def connect(self, user: int = 1, *, start: bool = True) -> Http2Limits:
        limits = self.usages.connect(user, self.broken.append)
        if start:
            assert limits.from_client(START) == len(START)
        return limits


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- tasks go on
            await asyncio.sleep(0)


@pytest.mark.parametrize("piece", [1, 2, 5, 8, 9, 10, 13, 1000])
async def test_frames_are_counted_however_they_are_cut(piece: int) -> None:
    limits = Counted().connect(start=False)
    sent = (
        START
        + begin(1, 100)
        + frame(SETTINGS, 0, 0, bytes(6))
        + begin(3)
        + frame(CONTINUATION, 0, 3, b"x")
        + begin(5, 7)
    )
    for at in range(0, len(sent), piece):
        part = sent[at : at + piece]
        assert limits.from_client(part) == len(part)
    usage = limits.usage
    assert (usage.calls, usage.request_bytes, usage.is_full) == (3, 107, True)
    answers = frame(SETTINGS) + frame(HEADERS, END_HEADERS, 1, b"x") + frame(DATA, 0, 1, bytes(20))
    answers += frame(HEADERS, END_HEADERS | END_STREAM, 1, b"xyz") + frame(RST_STREAM, 0, 3, bytes(4))
    answers += frame(RST_STREAM, 0, 1, bytes(4))  # has ended already
    for at in range(0, len(answers), piece):
        limits.from_server(memoryview(answers)[at : at + piece])
    assert (usage.calls, usage.request_bytes, usage.is_full) == (1, 7, False)


@pytest.mark.parametrize("cut", range(10))
async def test_a_call_too_many_waits_and_is_passed_on_when_another_has_ended(cut: int) -> None:
    limits = Counted(calls=1).connect()
    first, second = begin(1), begin(3, 10)
    sent = first + second
    at = limits.from_client(sent[: len(first) + cut])
    assert len(first) <= at <= len(first) + min(cut, 8)  # a part of its head may have gone
    assert limits.from_client(sent[at:]) == 0 or cut in range(1, 9)
    resumed: list[bool] = []
    limits.usage.wait(lambda: resumed.append(True))
    limits.from_server(memoryview(frame(RST_STREAM, 0, 1, bytes(4))))
    assert resumed == [True]
    assert limits.from_client(sent[at:]) == len(sent) - at
    assert (limits.usage.calls, limits.usage.request_bytes) == (1, 10)


async def test_the_connections_of_one_user_count_together_and_others_apart() -> None:
    counted = Counted(calls=2)
    one, two, other = counted.connect(), counted.connect(), counted.connect(2)
    one.from_client(begin(1))
    two.from_client(begin(1))
    assert one.from_client(begin(3)) == 0
    assert other.from_client(begin(1)) == len(begin(1))
    two.close()
    assert one.from_client(begin(3)) == len(begin(3))
    one.from_client(frame(RST_STREAM, 0, 3, bytes(4)))
    assert one.usage.calls == 1


async def test_who_waits_no_more_is_not_called() -> None:
    counted = Counted(calls=1)
    limits = counted.connect()
    limits.from_client(begin(1))
    called: list[int] = []
    waiting = [lambda number=number: called.append(number) for number in range(3)]
    for each in waiting:
        limits.usage.wait(each)
    limits.usage.stop_waiting(waiting[1])
    limits.from_client(frame(RST_STREAM, 0, 1, bytes(4)))
    assert called == [0, 2]


async def test_a_thousand_connections_that_wait_may_all_be_closed_when_they_are_resumed() -> None:
    """Each that is closed ends calls, and so could resume the next one within its own resumption, and so on."""
    counted = Counted(calls=1, unseen_calls=10_000)
    first = counted.connect()
    first.from_client(begin(1))
    early = PREFACE + frame(SETTINGS) + frame(HEADERS, END_HEADERS, 1, bytes(_MOST_EARLY_BYTES + 1))
    closed: list[Http2Limits] = []

    def wait(limits: Http2Limits) -> None:
        rest = early[limits.from_client(early) :]

        def resume() -> None:
            with pytest.raises(LimitError):
                limits.from_client(rest)
            limits.close()
            closed.append(limits)

        limits.usage.wait(resume)

    waiting = [counted.connect(start=False) for _ in range(1000)]
    for each in waiting:
        wait(each)
    first.from_server(memoryview(frame(RST_STREAM, 0, 1, bytes(4))))
    assert closed == waiting
    assert (first.usage.calls, first.usage.connections) == (0, 1)


async def test_a_user_who_left_and_came_back_while_grpc_was_asked_is_not_forgotten() -> None:
    counted = Counted(calls=1000, unseen_calls=4)
    counted.connect(1)
    left = counted.connect(2)
    other = counted.connect(1)
    other.from_client(begin(1) + begin(3))
    await asyncio.sleep(0)
    left.close()
    back = counted.connect(2)
    counted.answers.put_nowait(True)
    await until(lambda: other.usage.unseen_calls == 0)
    assert counted.connect(2).usage is back.usage


async def test_calls_that_python_has_not_seen_are_bounded_for_each_user() -> None:
    counted = Counted(calls=1000, unseen_calls=4)
    one, other = counted.connect(1), counted.connect(2)
    for stream in (1, 3, 5, 7):
        one.from_client(begin(stream))
        one.from_server(memoryview(frame(RST_STREAM, 0, stream, bytes(4))))  # has ended, and may still be queued
    assert one.from_client(begin(9)) == 0
    await asyncio.sleep(0)
    for stream in (1, 3, 5, 7):  # after it was asked
        other.from_client(begin(stream))
    counted.answers.put_nowait(False)  # gRPC could not tell: it is asked again
    counted.answers.put_nowait(True)
    await until(lambda: one.usage.unseen_calls == 0)
    assert one.from_client(begin(9)) == len(begin(9))
    assert other.from_client(begin(9)) == 0
    counted.answers.put_nowait(True)  # without another call of that user
    await until(lambda: other.usage.unseen_calls == 0)


async def test_requests_that_are_not_answered_have_a_bound_in_bytes() -> None:
    counted = Counted(calls=1000, request_bytes=1000)
    limits = counted.connect()
    assert limits.from_client(begin(1, 1000)) == len(begin(1, 1000))
    assert limits.from_client(begin(3, 1)) == 0
    with pytest.raises(LimitError, match="take 2001 bytes"):
        limits.from_client(frame(DATA, 0, 1, bytes(1001)))
    limits.close()
    assert (limits.usage.calls, limits.usage.request_bytes) == (0, 0)


async def test_headers_before_the_acknowledgement_have_a_bound() -> None:
    counted = Counted(calls=1000)
    limits = counted.connect(start=False)
    limits.from_client(PREFACE + frame(SETTINGS) + frame(HEADERS, END_HEADERS, 1, bytes(_MOST_EARLY_BYTES - 1)))
    with pytest.raises(LimitError, match="before it acknowledged"):
        limits.from_client(frame(CONTINUATION, 0, 1, bytes(2)))
    late = counted.connect()
    late.from_client(frame(HEADERS, END_HEADERS, 1, bytes(5000)))


async def test_a_user_is_forgotten_when_nothing_is_left_to_be_counted() -> None:
    counted = Counted(calls=1000, unseen_calls=4)
    limits = counted.connect()
    limits.from_client(begin(1) + begin(3))
    limits.close()
    assert len(counted.usages) == 1  # connecting anew does not reset the count
    counted.answers.put_nowait(True)
    await until(lambda: not len(counted.usages))
    counted.connect().close()
    assert not len(counted.usages)
    counted.usages.close()
