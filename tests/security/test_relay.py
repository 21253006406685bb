"""The relay: every byte arrives, nothing is kept for ever, and the other side sees whom the kernel names."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog.testing

from mig_agent.adapters.transport.connection_limits import ConnectionLimits, allow_open_files
from mig_agent.adapters.transport.peer_credentials import Peer, bound_name, peer_from, peer_of
from mig_agent.adapters.transport.proxy_connection import ConnectionEnds, Ending
from mig_agent.adapters.transport.relay import Relay
from mig_agent.adapters.transport.tcp import client_of
from mig_agent.adapters.users import Users

SECONDS = 30.0
ME = Peer(uid=os.getuid(), pid=os.getpid())


class Target:
    """What stands behind the relay. Hands over what is accepted, with the name that its peer has bound."""

    def __init__(self, path: Path, backlog: int = 128) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(backlog)
        self.listener.setblocking(False)

    async def accept(self) -> tuple[socket.socket, Peer | None]:
        loop = asyncio.get_running_loop()
        connection, name = await asyncio.wait_for(loop.sock_accept(self.listener), SECONDS)
        # As gRPC writes the address.
        return connection, peer_from("unix-abstract:" + bytes(name).removeprefix(b"\0").decode())


class Place:
    """A relay with its target, and how to get to it."""

    def __init__(
        self, folder: Path, places: ConnectionLimits, users: Users, backlog: int, who: Callable[[socket.socket], Peer]
    ) -> None:
        self.path = folder / "outer"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(128)
        self.target = Target(folder / "inner", backlog)
        self.places = places
        self.fates = ConnectionEnds()
        self.relay = Relay(listener, str(folder / "inner"), who=who, limits=places, users=users, ends=self.fates)
        self.relay.start()

    async def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(client, str(self.path))
        except OSError:
            client.close()
            raise
        return client

    async def linked(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of one connection."""
        client = await self.connect()
        return client, (await self.target.accept())[0]

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = asyncio.get_running_loop().time() + SECONDS
        while not condition():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def relaying(
    folder: Path,
    places: ConnectionLimits | None = None,
    users: Users | None = None,
    backlog: int = 128,
    who: Callable[[socket.socket], Peer] = peer_of,
) -> AsyncIterator[Place]:
    place = Place(folder, places or ConnectionLimits(100), users or Users(lambda _: "me"), backlog, who)
    try:
        yield place
    finally:
        await place.relay.close(0.0)
        place.target.listener.close()


async def read_all(connection: socket.socket, *, slowly: bool = False) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    while part := await asyncio.wait_for(loop.sock_recv(connection, 100_000), SECONDS):
        parts.append(part)
        if slowly:
            await asyncio.sleep(0)
    return b"".join(parts)


async def send_all(connection: socket.socket, data: bytes) -> None:
    await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(connection, data), SECONDS)
    connection.shutdown(socket.SHUT_WR)


async def test_the_other_side_sees_the_kernels_user_and_process(folder: Path) -> None:
    async with relaying(folder) as place:
        client = await place.connect()
        server, seen = await place.target.accept()
        assert seen == ME
        client.close()
        server.close()


async def test_a_name_that_a_client_has_bound_itself_is_not_taken_for_its_own(folder: Path) -> None:
    async with relaying(folder) as place:
        with socket.socket(socket.AF_UNIX) as client:
            client.bind(bound_name(Peer(uid=0, pid=1)))
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, str(place.path))
            server, seen = await place.target.accept()
            assert seen == ME
            server.close()


async def test_every_byte_arrives_in_both_directions_at_once(folder: Path) -> None:
    there, back = random.Random(1).randbytes(3_000_000), random.Random(2).randbytes(2_000_000)  # noqa: S311 -- no secret
    async with relaying(folder) as place:
        client, server = await place.linked()
        with client, server:
            _, _, got_there, got_back = await asyncio.gather(
                send_all(client, there),
                send_all(server, back),
                read_all(server, slowly=True),
                read_all(client, slowly=True),
            )
        assert got_there == there
        assert got_back == back
        await place.until(lambda: not len(place.relay))


async def test_a_client_that_has_said_its_last_still_gets_its_answer(folder: Path) -> None:
    async with relaying(folder) as place:
        client, server = await place.linked()
        with client, server:
            await send_all(client, b"question")
            assert await read_all(server) == b"question"
            await send_all(server, b"answer")
            assert await read_all(client) == b"answer"


async def test_for_a_reader_that_does_not_read_little_is_kept(folder: Path) -> None:
    async with relaying(folder) as place:
        client, server = await place.linked()
        with client, server:
            sent = 0
            loop = asyncio.get_running_loop()
            with contextlib.suppress(TimeoutError):
                while sent < 64_000_000:
                    await asyncio.wait_for(loop.sock_sendall(server, bytes(50_000)), 1.0)
                    sent += 50_000
            assert sent < 4_000_000  # what the kernel's two buffers and one piece of ours take
            server.close()
            assert len(await read_all(client)) >= sent


@pytest.mark.parametrize("who", ["client", "server"])
async def test_when_one_end_is_gone_the_other_is_told_and_the_place_is_free(folder: Path, who: str) -> None:
    async with relaying(folder) as place:
        client, server = await place.linked()
        gone, left = (client, server) if who == "client" else (server, client)
        gone.close()
        assert await read_all(left) == b""
        left.close()
        await place.until(lambda: not len(place.relay))
        assert place.places.acquire(ME.uid) == ""


async def test_a_silent_client_keeps_no_place_when_grpc_has_ended_its_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mig_agent.adapters.transport.proxy_connection._LAST_WORDS_SECONDS", 0.1)
    async with relaying(folder) as place:
        client, server = await place.linked()
        server.close()
        await place.until(lambda: not len(place.relay))
        client.close()


@pytest.mark.parametrize("speaks", [False, True], ids=["says nothing", "goes on sending"])
async def test_who_reads_nothing_for_long_loses_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    monkeypatch.setattr("mig_agent.adapters.transport.proxy_connection._STUCK_SECONDS", 0.3)
    async with relaying(folder) as place:
        client, server = await place.linked()
        with client, server:
            filling = asyncio.create_task(send_all(server, bytes(50_000_000)))
            while len(place.relay):
                if speaks:  # as much as there is room for: this direction moves and waits in turns
                    with contextlib.suppress(OSError):
                        client.send(bytes(100_000))
                    with contextlib.suppress(OSError):
                        server.recv(50_000, socket.MSG_DONTWAIT)
                await asyncio.sleep(0.001)
            with contextlib.suppress(OSError):
                await filling
        assert place.places.acquire(ME.uid) == ""


async def test_who_reads_a_little_now_and_then_keeps_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mig_agent.adapters.transport.proxy_connection._STUCK_SECONDS", 10.0)
    async with relaying(folder) as place:
        client, server = await place.linked()
        with client, server:
            filling = asyncio.create_task(send_all(server, bytes(3_000_000)))
            loop = asyncio.get_running_loop()
            (link,) = place.relay._links
            timers = set()
            read = 0
            while read < 3_000_000:
                read += len(await asyncio.wait_for(loop.sock_recv(client, 50_000), SECONDS))
                timers.add(link._responses._stuck)
                await asyncio.sleep(0)
            await filling
            assert len(timers) > 2  # set anew each time
            assert link._responses._stuck is None
            assert len(place.relay) == 1


@pytest.mark.parametrize(
    ("who", "how"),
    [
        ("client", Ending.HUNG_UP),
        ("client with unread bytes", Ending.HUNG_UP),
        ("server", Ending.BROKEN),
        ("nobody", None),
    ],
)
async def test_how_a_connection_ended_is_known(folder: Path, who: str, how: Ending | None) -> None:
    async with relaying(folder) as place:
        client, server = await place.linked()
        with client, server:
            (fate,) = place.fates._open.values()
            assert fate.ending is None
            if "unread" in who:
                server.send(b"unread")
                await place.until(lambda: select.select([client], [], [], 0)[0])
            if who != "nobody":
                (server if who == "server" else client).close()
            assert await fate.within(SECONDS if how else 0.05) is how
        await place.until(lambda: not place.fates._open)  # and nothing is kept of it


@pytest.mark.parametrize(("abruptly", "how"), [(False, Ending.HUNG_UP), (True, Ending.BROKEN)])
async def test_over_tcp_an_end_is_told_from_a_reset(folder: Path, abruptly: bool, how: Ending) -> None:
    target = Target(folder / "inner")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    places, fates = ConnectionLimits(5), ConnectionEnds()
    relay = Relay(listener, str(folder / "inner"), who=client_of, limits=places, users=Users(), ends=fates)
    relay.start()
    client = socket.create_connection(("127.0.0.1", port))
    server, seen = await target.accept()
    try:
        assert seen is None  # its certificate says who it is, and nothing else
        ((name, fate),) = fates._open.items()
        assert peer_from(name) is None
        assert fates.of(name) is fate
        if abruptly:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert await fate.within(SECONDS) is how
        gone = fates.of("unix-abstract:mig-agent.tcp.0123456789abcdef")
        assert gone is not None
        assert gone.ending is Ending.HUNG_UP
        assert fates.of("ipv4:127.0.0.1:1") is None
    finally:
        server.close()
        await relay.close(0.0)
        target.listener.close()


async def test_a_place_is_given_back_when_no_thread_can_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with relaying(folder, users=Users()) as place:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            client, server = await place.linked()
        client.close()
        server.close()
        await place.until(lambda: not len(place.relay))


async def test_a_client_that_dies_with_unread_bytes_leaves_nothing_behind(folder: Path) -> None:
    async with relaying(folder) as place:
        client, server = await place.linked()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(server, bytes(5_000_000)), 0.5)
        client.close()
        server.close()
        await place.until(lambda: not len(place.relay))


async def test_a_target_that_is_busy_gets_the_connection_later(folder: Path) -> None:
    async with relaying(folder, backlog=0) as place:
        clients = [await place.connect() for _ in range(4)]
        await asyncio.sleep(0.05)  # more than the backlog wait by now, or they come below: both are tried in time
        servers = [await place.target.accept() for _ in clients]
        assert [seen for _, seen in servers] == [ME] * 4
        for each in (*clients, *(server for server, _ in servers)):
            each.close()


async def test_one_too_many_is_marked_as_such_and_does_not_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mig_agent.adapters.transport.relay._SURPLUS_SECONDS", 0.2)
    monkeypatch.setattr("mig_agent.adapters.transport.relay._MOST_SURPLUS", 1)
    async with relaying(folder, places=ConnectionLimits(1)) as place:
        first, server = await place.linked()
        with structlog.testing.capture_logs() as logged:
            second = await place.connect()
            other, seen = await place.target.accept()
        assert seen == Peer(uid=ME.uid, pid=ME.pid, surplus=True)
        assert [each["event"] for each in logged] == ["a connection was turned away"]
        third = await place.connect()
        assert await read_all(third) == b""  # not even that
        assert await read_all(second) == b""
        first.close()
        server.close()
        await place.until(lambda: not len(place.relay))
        again, server = await place.linked()
        for each in (second, other, third, again, server):
            each.close()


async def test_at_the_end_what_was_said_last_still_arrives(folder: Path) -> None:
    async with relaying(folder) as place:
        client, server = await place.linked()
        server.send(b"goodbye")
        server.close()
        place.relay.stop_accepting()
        ending = asyncio.create_task(place.relay.close(SECONDS))
        assert await read_all(client) == b"goodbye"
        client.close()
        await asyncio.wait_for(ending, SECONDS)
        with pytest.raises(ConnectionRefusedError):
            await place.connect()


async def test_a_directory_that_hangs_delays_only_the_first_connection_of_its_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mig_agent.adapters.users._LOOKUP_WAIT_SECONDS", 0.1)
    answer = threading.Event()

    def find(_: int) -> str:
        answer.wait(SECONDS)
        return "late"

    users = Users(find)
    try:
        async with relaying(folder, users=users) as place:
            client, server = await place.linked()
            assert users.name(os.getuid()) == f"uid {os.getuid()}"
            assert users.is_fresh(os.getuid())  # the next one does not wait again
            answer.set()
            await place.until(lambda: users.name(os.getuid()) == "late")
            client.close()
            server.close()
    finally:
        answer.set()


async def test_users_names_are_learned_once_and_odd_ones_not_at_all() -> None:
    asked = []

    def find(uid: int) -> str:
        asked.append(uid)
        if uid == 3:
            raise KeyError(uid)
        return {1: "alice", 2: "evil\nname"}[uid]

    users = Users(find)
    for uid in (1, 2, 3):
        await asyncio.gather(users.learn(uid), users.learn(uid))
        assert users.is_fresh(uid)
    assert [users.name(uid) for uid in (1, 2, 3)] == ["alice", "uid 2", "uid 3"]
    assert sorted(asked) == [1, 2, 3]


def test_places_are_counted_in_all_and_for_one_user() -> None:
    places = ConnectionLimits(5, most_of_one=2, unbounded=(0,))
    assert [bool(places.acquire(7)) for _ in range(3)] == [False, False, True]
    assert [bool(places.acquire(0)) for _ in range(4)] == [False, False, False, True]
    places.release(0)
    assert places.acquire(7)
    assert not places.acquire(8)
    places.release(7)
    assert not places.acquire(7)


def test_files_for_connections_are_as_many_as_the_process_may_have() -> None:
    assert allow_open_files() >= 1


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:/run/mig-agent.0.1.kept.0123456789abcdef",
        "ipv4:127.0.0.1:1",
        "unix-abstract:mig-agent.0.1.kept.0123456789abcdef.x",
        "unix-abstract:mig-agent.-1.1.kept.0123456789abcdef",
        "unix-abstract:x.mig-agent.0.1.kept.0123456789abcdef",
    ],
)
def test_no_other_address_names_anybody(address: str) -> None:
    assert peer_from(address) is None


@pytest.mark.parametrize("peer", [Peer(0, 1), Peer(None, None), Peer(2**32 - 1, 2**22), Peer(5, 6, surplus=True)])
def test_a_name_carries_its_peer_and_is_never_the_same(peer: Peer) -> None:
    names = {bound_name(peer) for _ in range(50)}
    assert len(names) == 50
    for name in names:
        assert len(name) < 100  # sun_path has 108
        assert peer_from("unix-abstract:" + name.removeprefix(b"\0").decode()) == peer


async def test_a_thousand_connections_at_once_come_and_go_without_a_trace(folder: Path) -> None:
    number = min(1000, allow_open_files() * 3 // 5)  # the test has ends of its own
    loop = asyncio.get_running_loop()
    async with relaying(folder, places=ConnectionLimits(number)) as place:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- only how many
        for _ in range(2):
            links = []
            for _ in range(number):
                client = await place.connect()
                server, seen = await place.target.accept()
                assert seen == ME
                links.append((client, server))
            assert len(place.relay) == number
            for client, _ in links:
                client.send(b"ping")
            for client, server in links:
                assert await asyncio.wait_for(loop.sock_recv(server, 100), SECONDS) == b"ping"
                server.send(b"pong")
                assert await asyncio.wait_for(loop.sock_recv(client, 100), SECONDS) == b"pong"
                client.close()
            await place.until(lambda: all(_ended(server) for _, server in links))  # noqa: B023 -- called at once
            for _, server in links:
                server.close()
            await place.until(lambda: not len(place.relay))
            assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 -- the same


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


async def test_without_files_for_a_connection_it_waits_and_is_served_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mig_agent.adapters.transport.relay._PAUSE_SECONDS", 0.05)
    async with relaying(folder) as place:
        real, failures = place.relay._listener, 2

        class Scarce:
            """A listener that has no more files at first."""

            def accept(self) -> tuple[socket.socket, object]:
                nonlocal failures
                if failures:
                    failures -= 1
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                return real.accept()

            def fileno(self) -> int:
                return real.fileno()

            def close(self) -> None:
                real.close()

        monkeypatch.setattr(place.relay, "_listener", Scarce())
        with structlog.testing.capture_logs() as logged:
            client, server = await place.linked()
        assert [each["event"] for each in logged] == ["cannot accept a connection now"] * 2
        client.close()
        server.close()
