"""Whatever one user sends by HTTP/2, it takes a bounded part of the agent's memory, and others are served meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mig_agent.adapters.transport.http2_limits import _MOST_EARLY_BYTES
from mig_agent.client import Client
from mig_agent.daemon.servers import _MOST_OF_ONE_USER
from support.agent import Agent
from support.figures import Figure
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    RawClient,
    flood,
    frame,
    referring_headers,
    request_headers,
)
from support.people import ALICE, as_user, needs_root

MIB = 1 << 20
MOST_MIB = 256
SECONDS = 5.0
ACQUIRE, STATUS, EVENTS = (f"/migagent.v1.PartitionManager/{each}" for each in ("Acquire", "Status", "Events"))
REFERENCES = 3000
Call = Callable[[int, int], bytes]

pytestmark = needs_root


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    with Agent(folder, "a30", flags=["--socket-mode", "0666"]) as running:
        folder.chmod(0o755)
        yield running


def peak_mib(
    agent: Agent,
    call: Call,
    connections: int,
    *,
    acknowledges: bool = True,
    reads: bool = True,
    window: int | None = None,
) -> float:
    """The agent's memory at its highest while ALICE floods it, and others are served."""
    assert agent.process is not None
    process = psutil.Process(agent.process.pid)
    raised: list[BaseException] = []

    def attack() -> None:
        def connect() -> RawClient:
            return RawClient(agent.socket, acknowledges=acknowledges, reads=reads, window=window)

        try:
            as_user(ALICE, lambda: flood(connect, connections, call, SECONDS))
        except BaseException as error:  # noqa: BLE001 -- raised again below
            raised.append(error)

    thread = threading.Thread(target=attack)
    thread.start()
    peak = 0.0
    served = 0
    while thread.is_alive():
        peak = max(peak, process.memory_info().rss / MIB)
        if served < 2:
            served += agent.ask("status")["node"] == "tested"
        thread.join(0.05)
    if raised:
        raise raised[0]
    assert served
    assert not agent.log().count("Traceback")
    return peak


def referring(count: int, stream: int) -> bytes:
    """A call whose header list would be 12 MB."""
    return frame(HEADERS, END_HEADERS, stream, referring_headers(ACQUIRE, REFERENCES, first=not count))


def largest_headers(count: int, stream: int) -> bytes:
    """A call with as many headers as are taken, whose message never comes."""
    return frame(HEADERS, END_HEADERS, stream, referring_headers(ACQUIRE, 1 + bool(count), first=not count))


def reset(count: int, stream: int) -> bytes:
    """A call that is taken back at once."""
    return largest_headers(count, stream) + frame(RST_STREAM, 0, stream, (8).to_bytes(4, "big"))


def unfinished(_count: int, stream: int) -> bytes:
    """A call whose message of 1 MiB lacks its last byte."""
    size = MIB - 100
    message = b"\0" + size.to_bytes(4, "big") + bytes(size - 1)
    parts = [message[at : at + 16384] for at in range(0, len(message), 16384)]
    return frame(HEADERS, END_HEADERS, stream, request_headers(STATUS)) + b"".join(
        frame(DATA, 0, stream, part) for part in parts
    )


@pytest.mark.parametrize("acknowledges", [False, True])
@pytest.mark.parametrize("connections", [1, 3, 30, _MOST_OF_ONE_USER + 100])
def test_header_lists(agent: Agent, figure: Figure, connections: int, acknowledges: bool) -> None:
    peak = peak_mib(agent, referring, connections, acknowledges=acknowledges)
    figure(f"MiB under header lists over {connections} connections, settings acknowledged: {acknowledges}", int(peak))
    assert peak < MOST_MIB


def test_headers_before_the_settings_are_acknowledged(agent: Agent, figure: Figure) -> None:
    """As much as may come then, over as many connections as there may be."""

    def early(count: int, stream: int) -> bytes:
        if count:
            return b""
        entry = b"\x40\x01x" + b"\x7f" + bytes([400 - 127 & 127 | 128, 400 - 127 >> 7]) + b"a" * 400
        block = request_headers(ACQUIRE) + entry
        return frame(HEADERS, END_HEADERS, stream, block + b"\xbe" * (_MOST_EARLY_BYTES - len(block)))

    peak = peak_mib(agent, early, _MOST_OF_ONE_USER, acknowledges=False)
    figure("MiB under headers before the settings are acknowledged", int(peak))
    assert peak < MOST_MIB


def test_unread_answers_are_limited(agent: Agent, figure: Figure) -> None:
    """The client's windows for DATA are closed, so gRPC keeps each answer; there is enough to tell."""
    with Client(agent.address) as client:
        for _ in range(300):
            client.release(client.acquire(gpu_memory="4G").id)

    def call(_count: int, stream: int) -> bytes:
        headers = frame(HEADERS, END_HEADERS, stream, request_headers(EVENTS))
        return headers + frame(DATA, END_STREAM, stream, bytes(5))

    size = len(agent.migctl("events", "-o", "json").stdout)
    peak = peak_mib(agent, call, 20, window=0)
    figure("MiB under answers that are not taken", int(peak))
    assert size > 100_000
    assert peak < MOST_MIB
    assert agent.ask("events")["events"]


@pytest.mark.parametrize("call", [largest_headers, reset, unfinished])
@pytest.mark.parametrize("reads", [True, False])
def test_calls(agent: Agent, figure: Figure, call: Call, reads: bool) -> None:
    peak = peak_mib(agent, call, 100, reads=reads)
    figure(f"MiB under calls of the kind {call.__name__}, answers read: {reads}", int(peak))
    assert peak < MOST_MIB
