"""TCP is served only to clients with a certificate of the right authority."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from mig_agent.migctl.cli import run_command_line
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1 import partition_manager_pb2_grpc as rpc
from support.agent import GENEROUS_SECONDS, Agent
from support.certificates import Authority, Pem


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "clients")


@pytest.fixture
def server(authority: Authority) -> Pem:
    return authority.issue("server")


@pytest.fixture
def agent(folder: Path, authority: Authority, server: Pem) -> Iterator[Agent]:
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
    with Agent(folder, flags=flags, listen=[f"unix://{folder}/agent.sock", "127.0.0.1:0"]) as running:
        yield running


def tcp_address(agent: Agent) -> str:
    return str(agent.serving()["listen"][1])


def status_over_tcp(agent: Agent, credentials: grpc.ChannelCredentials | None) -> pb.StatusResponse:
    address = tcp_address(agent)
    channel = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    with channel:
        answer: pb.StatusResponse = rpc.PartitionManagerStub(channel).Status(
            pb.StatusRequest(), timeout=GENEROUS_SECONDS
        )
        return answer


def credentials_of(authority: Authority, client: Pem | None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=authority.ca.read_bytes(),
        private_key=client.key.read_bytes() if client else None,
        certificate_chain=client.cert.read_bytes() if client else None,
    )


def test_with_the_right_certificate_it_serves(agent: Agent, authority: Authority) -> None:
    client = authority.issue("scheduler")
    assert status_over_tcp(agent, credentials_of(authority, client)).node == "tested"
    tls = ["--tls-ca", str(authority.ca), "--tls-cert", str(client.cert), "--tls-key", str(client.key)]
    agent.migctl("request", "--gpu-memory", "4G", "--address", tcp_address(agent), *tls)
    (lease,) = agent.ask("status")["leases"]
    assert lease["devices"]


def test_a_command_runs_on_the_agents_machine_alone(
    agent: Agent, authority: Authority, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The device of another machine would do it no good."""
    client = authority.issue("scheduler")
    tls = ["--tls-ca", str(authority.ca), "--tls-cert", str(client.cert), "--tls-key", str(client.key)]
    run = ["run", "--gpu-memory", "4G", "--address", tcp_address(agent), *tls, "--", "echo", "it ran"]
    assert agent.migctl(*run).stdout == "it ran\n"
    monkeypatch.setattr("mig_agent.client.addresses.BOOT_ID_FILE", authority.ca)
    assert run_command_line(run) == 125
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("migctl: cannot run the command here on a device of tested: the agent at ")
    assert agent.ask("status")["leases"] == []


def test_without_a_certificate_it_does_not(agent: Agent, authority: Authority) -> None:
    for credentials in (None, credentials_of(authority, None)):
        with pytest.raises(grpc.RpcError) as caught:
            status_over_tcp(agent, credentials)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_with_a_strangers_certificate_it_does_not(agent: Agent, authority: Authority, folder: Path) -> None:
    stranger = Authority(folder, "strangers").issue("stranger")
    with pytest.raises(grpc.RpcError) as caught:
        status_over_tcp(agent, credentials_of(authority, stranger))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert agent.ask("status")["node"] == "tested"


def test_over_tcp_nobody_is_an_administrator(agent: Agent, authority: Authority) -> None:
    credentials = credentials_of(authority, authority.issue("scheduler"))
    with grpc.secure_channel(tcp_address(agent), credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        rpc.PartitionManagerStub(channel).Reclaim(pb.ReclaimRequest(), timeout=GENEROUS_SECONDS)
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_a_renewed_certificate_is_shown_without_a_restart(agent: Agent, folder: Path) -> None:
    """The clients come to trust a new authority only: the old certificate would no longer do."""
    fresh = Authority(folder, "fresh")
    fresh.issue("server", file="server")
    (folder / "clients-ca.pem").write_bytes(fresh.ca.read_bytes())
    assert status_over_tcp(agent, credentials_of(fresh, fresh.issue("scheduler"))).node == "tested"


def test_a_port_that_another_has_is_refused_in_one_line(
    agent: Agent, authority: Authority, server: Pem, folder: Path
) -> None:
    (folder / "b").mkdir()
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
    second = Agent(folder / "b", flags=flags, listen=[f"unix://{folder}/b/agent.sock", tcp_address(agent)])
    assert second.launch().wait(GENEROUS_SECONDS) == 1
    (line,) = map(json.loads, second.log().splitlines())
    assert line["event"].startswith(f"cannot listen on {tcp_address(agent)}: ")
    assert agent.ask("status")["node"] == "tested"
