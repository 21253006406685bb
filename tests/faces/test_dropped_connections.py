"""A network that drops a connection ends no lease; who ends one on purpose gives back what it held."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.client import Client, Tls
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.agent import GENEROUS_SECONDS, Agent, eventually
from support.certificates import Authority
from support.tls import channel_to, port_of, serving

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER, socket(7)."""


class Network:
    """Passes connections on to a port, and drops them when told to: neither side hears a goodbye."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._lines: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def drop(self) -> None:
        """Every connection that stands; new ones are passed on."""
        with self._lock:
            lines, self._lines = self._lines, []
        for each in lines:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            # For whoever waits to read; the reset follows when it is closed.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RD)
            each.close()

    def close(self) -> None:
        """Nothing is passed on any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.drop()
        for each in self._threads:
            each.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            with self._lock:
                self._lines += [client, server]
            for source, sink in ((client, server), (server, client)):
                thread = threading.Thread(target=_pass_on, args=(source, sink))
                self._threads.append(thread)
                thread.start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "clients")


@pytest.fixture
def agent(folder: Path, authority: Authority) -> Iterator[Agent]:
    with serving(folder, authority) as running:
        yield running


@pytest.fixture
def network(agent: Agent) -> Iterator[Network]:
    with contextlib.closing(Network(port_of(agent))) as passing:
        yield passing


def ended(agent: Agent) -> list[str]:
    """In words, of each lease that has."""
    return [each["message"] for each in agent.ask("events")["events"] if each["kind"] == "lease-ended"]


def test_a_connection_that_the_network_drops_ends_no_lease(
    agent: Agent, network: Network, authority: Authority
) -> None:
    own = authority.issue("alice")
    tls = Tls(ca=authority.ca, cert=own.cert, key=own.key)
    with Client(f"127.0.0.1:{network.port}", tls=tls) as client:
        lease = client.lease(gpu_memory="4G")
        connections = len(network._threads)
        for _ in range(3):
            network.drop()
            eventually(lambda: len(network._threads) > connections, "it connects again")  # noqa: B023 -- called at once
            connections = len(network._threads)
        assert [each.id for each in client.status().leases] == [lease.id]
        lease.release()
        assert lease.lost is None
    assert [each for each in ended(agent) if lease.id not in each] == []


def test_a_client_that_hangs_up_gives_back_what_it_held(agent: Agent, authority: Authority) -> None:
    with channel_to(agent, authority, authority.issue("alice")) as channel:
        stream = PartitionManagerStub(channel).Hold(pb.HoldRequest(request=pb.Request(wants=[pb.Want(memory="4G")])))
        assert next(iter(stream)).HasField("granted")
    eventually(lambda: not agent.ask("status")["leases"], "its lease has ended")


def test_a_client_that_ends_its_stream_gives_back_what_it_held(agent: Agent, authority: Authority) -> None:
    with channel_to(agent, authority, authority.issue("alice")) as channel:
        stub = PartitionManagerStub(channel)
        stream = stub.Hold(pb.HoldRequest(request=pb.Request(wants=[pb.Want(memory="4G")])))
        assert next(iter(stream)).HasField("granted")
        stream.cancel()
        eventually(lambda: not stub.Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS).leases, "its lease has ended")
    assert [each.endswith("ended: released by its client") for each in ended(agent)] == [True]
