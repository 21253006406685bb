"""Certificates that are replaced while the agent runs, its own and a client's, as the kubelet replaces a Secret's."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from mig_agent.client import AsyncClient, Client, NoAgent, Tls
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.agent import GENEROUS_SECONDS, Agent, eventually
from support.certificates import Authority, Pem
from support.tls import channel_to, port_of
from support.volumes import mount, swap

NAME = "mig-agent.gpus.svc"
"""In the agent's certificate: not the host that is dialled."""


@pytest.fixture
def old(folder: Path) -> Authority:
    return Authority(folder, "old")


@pytest.fixture
def new(folder: Path) -> Authority:
    return Authority(folder, "new")


@pytest.fixture
def agent(folder: Path, old: Authority) -> Iterator[Agent]:
    """Its certificates, and a client's, lie in folders of their own."""
    tls = folder / "tls"
    mount(tls, server_of(old), old.ca.read_text())
    mount(folder / "client", old.issue("slurm"), old.ca.read_text())
    flags = ["--tls-cert", str(tls / "tls.crt"), "--tls-key", str(tls / "tls.key")]
    flags += ["--tls-client-ca", str(tls / "ca.crt"), "--tls-schedulers", "slurm", "--tls-users", ""]
    with Agent(folder, flags=flags, listen=[f"unix://{folder}/agent.sock", "127.0.0.1:0"]) as running:
        yield running


def server_of(authority: Authority) -> Pem:
    return authority.issue("server", file=f"server-{authority.ca.stem}", also=[NAME])


def tls_of(folder: Path) -> Tls:
    """The client's folder, and the name that the agent's certificate has."""
    client = folder / "client"
    return Tls(ca=client / "ca.crt", cert=client / "tls.crt", key=client / "tls.key", server_name=NAME)


def client_of(agent: Agent, folder: Path, *, patience: float = GENEROUS_SECONDS) -> Client:
    return Client(f"127.0.0.1:{port_of(agent)}", tls=tls_of(folder), patience=patience)


def status(agent: Agent, authority: Authority, client: Pem) -> str:
    with channel_to(agent, authority, client) as channel:
        node: str = PartitionManagerStub(channel).Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS).node
        return node


def told(agent: Agent, kind: str) -> list[str]:
    return [each["message"] for each in agent.ask("events")["events"] if each["kind"] == kind]


def test_a_rotation_is_taken_up_at_the_next_connection(
    agent: Agent, folder: Path, old: Authority, new: Authority
) -> None:
    assert status(agent, old, old.issue("slurm")) == "tested"
    swap(folder / "tls", server_of(new), new.ca.read_text())
    assert status(agent, new, new.issue("slurm", file="slurm-new")) == "tested"
    with pytest.raises(grpc.RpcError) as caught:
        status(agent, old, old.issue("slurm"))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    (words,) = told(agent, "certificates-renewed")
    assert words.startswith("the agent's certificate and the clients' authority were renewed; connections")


def test_a_rotation_that_does_not_fit_together_is_told_and_left(agent: Agent, folder: Path, old: Authority) -> None:
    """The log and an event say which file, and what stays."""
    swap(folder / "tls", Pem(server_of(old).cert, old.issue("other").key), old.ca.read_text())
    assert status(agent, old, old.issue("slurm")) == "tested"
    (words,) = told(agent, "certificate-reload-failed")
    assert words.startswith(f"cannot use the certificate {folder}/tls/tls.crt with the key")
    assert words.endswith("they do not belong together; the former certificates stay in use")
    lines = [json.loads(line) for line in agent.log().splitlines() if "do not belong together" in line]
    assert [line["level"] for line in lines] == ["error"]
    assert status(agent, old, old.issue("slurm")) == "tested"
    assert len(told(agent, "certificate-reload-failed")) == 1


def test_who_is_connected_under_a_withdrawn_authority_is_cut_off(
    agent: Agent, folder: Path, old: Authority, new: Authority
) -> None:
    """With nobody connecting anew: a stream that stands would otherwise stand for ever."""
    with channel_to(agent, old, old.issue("slurm")) as channel:
        watching = PartitionManagerStub(channel).Watch(pb.WatchRequest(), timeout=GENEROUS_SECONDS * 2)
        assert next(iter(watching)).revision
        swap(folder / "tls", server_of(new), new.ca.read_text())
        with pytest.raises(grpc.RpcError) as caught:
            list(watching)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert told(agent, "certificates-renewed")


def test_an_authority_more_and_a_certificate_anew_disturb_nobody(
    agent: Agent, folder: Path, old: Authority, new: Authority
) -> None:
    with channel_to(agent, old, old.issue("slurm")) as channel:
        stub = PartitionManagerStub(channel)
        watching = stub.Watch(pb.WatchRequest(), timeout=GENEROUS_SECONDS * 4)
        assert next(iter(watching)).revision
        swap(folder / "tls", server_of(old), old.ca.read_text() + new.ca.read_text())
        eventually(lambda: told(agent, "certificates-renewed"), "the rotation is told", GENEROUS_SECONDS)
        kinds = (each.event.kind for each in watching)
        assert next(kinds) == "certificates-renewed"
        assert stub.Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS).node == "tested"


def test_a_client_takes_up_its_own_new_certificate(agent: Agent, folder: Path, old: Authority, new: Authority) -> None:
    """The three steps of a new authority, with one client all the time, and a lease that it holds from the first."""
    both = old.ca.read_text() + new.ca.read_text()
    with client_of(agent, folder) as client:
        lease = client.lease(gpu_memory="4G", tenant="team-a")
        swap(folder / "tls", server_of(old), both)
        swap(folder / "client", new.issue("slurm", file="slurm-new"), both)
        assert client.status().node == "tested"
        swap(folder / "tls", server_of(new), new.ca.read_text())
        eventually(lambda: len(told(agent, "certificates-renewed")) == 2, "the rotation is told", GENEROUS_SECONDS)
        (held,) = client.status().leases
        assert held.id == lease.id
        lease.release()
        assert not client.status().leases


async def test_an_asynchronous_client_takes_it_up_as_well(
    agent: Agent, folder: Path, old: Authority, new: Authority
) -> None:
    both = old.ca.read_text() + new.ca.read_text()
    async with AsyncClient(f"127.0.0.1:{port_of(agent)}", tls=tls_of(folder), patience=GENEROUS_SECONDS) as client:
        lease = await client.lease(gpu_memory="4G", tenant="team-a")
        swap(folder / "tls", server_of(new), both)
        swap(folder / "client", new.issue("slurm", file="slurm-new"), new.ca.read_text())
        assert (await client.status()).node == "tested"
        swap(folder / "tls", server_of(new), new.ca.read_text())
        revoked = functools.partial(told, agent, "certificates-renewed")
        await asyncio.to_thread(eventually, lambda: len(revoked()) == 2, "the rotation is told", GENEROUS_SECONDS)
        (held,) = (await client.status()).leases
        assert held.id == lease.id
        await lease.release()


def test_a_client_whose_authority_is_gone_is_told_so(agent: Agent, folder: Path, new: Authority) -> None:
    with client_of(agent, folder, patience=0.1) as client:
        assert client.status().node == "tested"
        swap(folder / "tls", server_of(new), new.ca.read_text())
        eventually(lambda: told(agent, "certificates-renewed"), "the rotation is told", GENEROUS_SECONDS)
        with pytest.raises(NoAgent, match=r"cannot trust the agent at 127.*: its certificate is not good"):
            client.status()
