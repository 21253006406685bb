"""Other users of this machine, for tests that run as root.

SO_PEERCRED is the user of the thread that connects, so no other process is needed: a thread takes on the user by itself
(the raw system call changes one thread, where the C library's function changes all), connects, and passes bytes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub

_SETRESUID = {"x86_64": 117, "aarch64": 147}.get(platform.machine())
ALICE, BOB, NOBODY = 60_001, 60_002, 65_534
"""The first two have no names on any machine; the third is nobody's number (proc_sys_kernel(5), overflowuid)."""


def become(uid: int) -> None:
    """This thread alone acts as another user from now on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_SETRESUID, uid, uid, uid) != 0:
        raise OSError(ctypes.get_errno(), "setresuid")


def as_user(uid: int, what: object) -> None:
    """Calls `what` in a thread of that user, and raises what it raised."""
    assert callable(what)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            become(uid)
            what()
        except BaseException as error:  # noqa: BLE001 -- raised again below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _can_become() -> bool:
    try:
        for uid in (ALICE, BOB, NOBODY):
            as_user(uid, lambda: None)
    except OSError:  # not root, or in a container that has not all users
        return False
    return True


needs_root = pytest.mark.skipif(_SETRESUID is None or not _can_become(), reason="only root may take on other users")


class Person:
    """A user, and a socket behind which everything that connects to the target does so as that user."""

    def __init__(self, uid: int, target: Path, folder: Path) -> None:
        self.uid = uid
        self.path = folder / f"as-{uid}"
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._open: set[socket.socket] = set()
        self._closing = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends all connections and threads."""
        self._closing = True
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.path))  # wakes the one that accepts
        self._threads[0].join()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (*self._open, self._listener):
            each.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._closing:
                client.close()
                return
            self._open.add(client)
            self._begin(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        self._open.add(server)
        become(self.uid)
        try:
            server.connect(str(self._target))
        except OSError:
            client.shutdown(socket.SHUT_RDWR)
            return
        self._begin(_pump, client, server)
        _pump(server, client)

    def _begin(self, target: object, *arguments: socket.socket) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()


@contextmanager
def person(uid: int, target: Path, folder: Path) -> Iterator[PartitionManagerStub]:
    """A stub whose calls come from that user."""
    who = Person(uid, target, folder)
    try:
        with grpc.insecure_channel(f"unix:{who.path}", options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            yield PartitionManagerStub(channel)
    finally:
        who.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    for each, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            each.shutdown(how)
