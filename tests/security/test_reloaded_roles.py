"""Roles that change while the agent runs: whoever has lost theirs is turned away, also on open connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from mig_agent.daemon.cert_reload import CHECK_SECONDS
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.agent import GENEROUS_SECONDS, eventually
from support.certificates import Authority
from support.reloaded import Reloaded
from support.tls import channel_to


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "ca")


@pytest.fixture
def agent(folder: Path, authority: Authority) -> Iterator[Reloaded]:
    server = authority.issue("server")
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
    listen = [f"unix://{folder}/agent.sock", "127.0.0.1:0"]
    with Reloaded(folder, "tls_users: [alice]\n", flags=flags, listen=listen) as running:
        yield running


def code_of(agent: Reloaded, authority: Authority, name: str) -> grpc.StatusCode:
    with channel_to(agent, authority, authority.issue(name)) as channel:
        try:
            PartitionManagerStub(channel).Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_a_user_who_is_removed_is_cut_off_and_one_who_is_added_is_served(agent: Reloaded, authority: Authority) -> None:
    assert code_of(agent, authority, "alice") is grpc.StatusCode.OK
    assert code_of(agent, authority, "bob") is grpc.StatusCode.PERMISSION_DENIED
    with channel_to(agent, authority, authority.issue("alice")) as channel:
        watching = PartitionManagerStub(channel).Watch(pb.WatchRequest(), timeout=GENEROUS_SECONDS)
        next(iter(watching))
        agent.reload("tls_users: [alice, bob]\n")
        assert code_of(agent, authority, "bob") is grpc.StatusCode.OK
        assert watching.is_active(), "who keeps a role keeps the connection"
        event = agent.reload("tls_users: [bob]\n")
        assert event["message"] == "the configuration was read again: tls_users is bob (was alice, bob)"
        with pytest.raises(grpc.RpcError) as ended:
            for _ in watching:
                pass
        assert ended.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    assert code_of(agent, authority, "alice") is grpc.StatusCode.PERMISSION_DENIED


def test_a_reload_looks_at_the_certificates_at_once(agent: Reloaded, authority: Authority, folder: Path) -> None:
    """Not only at the next connection, or when it is their time."""
    other = Authority(folder, "other")
    authority.ca.write_text(authority.ca.read_text() + other.ca.read_text())
    agent.reload("tls_users: [alice]\n")

    def renewed() -> bool:
        return any(each["kind"] == "certificates-renewed" for each in agent.ask("events", "--since", "1h")["events"])

    eventually(renewed, "the authorities are taken up", seconds=CHECK_SECONDS / 2)
