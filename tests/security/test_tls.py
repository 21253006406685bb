"""TCP: TLS 1.2 or newer with a certificate of the right authority, whose name says what its holder may do."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.adapters.grpc_errors import TRAILER
from mig_agent.client import Client, NoAgent, Tls
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.acquire import granted as granted_to
from support.agent import GENEROUS_SECONDS, Agent
from support.certificates import Authority, Pem
from support.tls import PREFACE, channel_to, client_context, port_of, serving, shake

ROLES = ["--tls-admins", "ops, root-ops", "--tls-schedulers", "slurm"]


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "clients")


@pytest.fixture
def agent(folder: Path, authority: Authority) -> Iterator[Agent]:
    with serving(folder, authority, *ROLES) as running:
        yield running


Calling = Callable[[str], PartitionManagerStub]


@pytest.fixture
def calling(agent: Agent, authority: Authority) -> Iterator[Calling]:
    """A stub with a certificate of this name."""
    with ExitStack() as stack:
        yield lambda name: stub_of(stack, agent, authority, authority.issue(name))


def stub_of(stack: ExitStack, agent: Agent, authority: Authority, client: Pem) -> PartitionManagerStub:
    return PartitionManagerStub(stack.enter_context(channel_to(agent, authority, client)))


def acquire(stub: PartitionManagerStub, *, tenant: str = "", name: str = "") -> pb.Granted:
    request = pb.Request(wants=[pb.Want(memory="4G")], holder=pb.Holder(tenant=tenant, name=name))
    return granted_to(stub, request, GENEROUS_SECONDS)


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return next(pb.RefusalDetail.FromString(value).reason for key, value in error.trailing_metadata() if key == TRAILER)


# Handshakes


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_as_it_should_be_is_accepted(agent: Agent, authority: Authority, version: ssl.TLSVersion) -> None:
    """The control for all that follow."""
    assert shake(agent, client_context(authority, authority.issue("alice"), version)) is not None


@pytest.mark.skipif(not (ssl.HAS_TLSv1 and ssl.HAS_TLSv1_1), reason="this Python's OpenSSL has no such old TLS")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_older_tls_is_not(agent: Agent, authority: Authority, version: ssl.TLSVersion) -> None:
    context = client_context(authority, authority.issue("alice"), version)
    with pytest.raises((ssl.SSLError, ConnectionError)) as caught:
        shake(agent, context)
    # The agent said so, rather than this client that it has no such version.
    assert "NO_PROTOCOLS_AVAILABLE" not in str(caught.value)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_without_a_certificate_or_with_a_strangers_there_is_no_connection(
    agent: Agent, authority: Authority, folder: Path, version: ssl.TLSVersion
) -> None:
    strangers = Authority(folder, "strangers")
    for client in (None, strangers.issue("ops")):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            shake(agent, client_context(authority, client, version))


def test_who_cannot_connect_is_told_why(folder: Path, authority: Authority) -> None:
    """Each is a mistake in one of three files or in the name, and gRPC's own words name none of them."""
    own, strangers = authority.issue("slurm"), Authority(folder, "strangers")
    with serving(folder, authority, host="127.0.0.2", also=["mig-agent.gpus.svc"]) as agent:

        def words(ca: Path, client: Pem, name: str = "mig-agent.gpus.svc") -> str:
            tls = Tls(ca=ca, cert=client.cert, key=client.key, server_name=name)
            with Client(f"127.0.0.2:{port_of(agent)}", tls=tls, patience=0.1) as calling:
                try:
                    return calling.status().node
                except NoAgent as error:
                    return f"{error.message} {error.hint}"

        assert words(authority.ca, own) == "tested"
        assert "its certificate has another name give the name that it has: --tls-server-name" in words(
            authority.ca, own, ""
        )
        assert "is --tls-ca the authority that signed it?" in words(strangers.ca, own)
        refused = words(authority.ca, strangers.issue("slurm", file="other"))
        assert "does it accept your certificate?" in refused or "the connection broke" in refused
        mixed = Pem(cert=own.cert, key=strangers.issue("slurm", file="mixed").key)
        assert "do they belong together" in words(authority.ca, mixed)


def test_without_tls_there_is_no_connection(agent: Agent) -> None:
    with socket.create_connection(("127.0.0.1", port_of(agent)), GENEROUS_SECONDS) as plain:
        plain.sendall(PREFACE)
        answer = b""
        try:
            while part := plain.recv(1000):
                answer += part
        except ConnectionError:
            pass
    assert b"\x00\x00\x00\x04" not in answer[:9]  # no SETTINGS of HTTP/2


# Roles


def test_a_user_asks_for_itself_alone(calling: Calling) -> None:
    alice = calling("alice")
    granted = acquire(alice)
    assert granted.lease.holder == pb.Holder(tenant="alice", name="alice")
    assert acquire(alice, name="training").lease.holder == pb.Holder(tenant="alice", name="alice (training)")
    assert reason_of(lambda: acquire(alice, tenant="bob")) == "not-permitted"
    assert reason_of(lambda: alice.Reclaim(pb.ReclaimRequest(), timeout=GENEROUS_SECONDS)) == "not-permitted"
    for token in ("", "x"):
        request = pb.ReleaseRequest(lease=granted.lease.id, token=token)
        assert reason_of(lambda: calling("bob").Release(request, timeout=GENEROUS_SECONDS)) in {  # noqa: B023 -- at once
            "not-permitted",
            "wrong-token",
        }
    alice.Release(pb.ReleaseRequest(lease=granted.lease.id, token=granted.token), timeout=GENEROUS_SECONDS)


def test_a_scheduler_asks_for_others_and_is_no_administrator(calling: Calling) -> None:
    slurm = calling("slurm")
    assert acquire(slurm, tenant="team-a", name="job 7").lease.holder == pb.Holder(tenant="team-a", name="job 7")
    assert reason_of(lambda: slurm.Cordon(pb.CordonRequest(gpu="0"), timeout=GENEROUS_SECONDS)) == "not-permitted"
    (lease,) = slurm.Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS).leases
    release = pb.ReleaseRequest(lease=lease.id)
    assert reason_of(lambda: slurm.Release(release, timeout=GENEROUS_SECONDS)) == "not-permitted"


def test_an_administrator_does_what_one_does(calling: Calling) -> None:
    ops = calling("ops")
    lease = acquire(calling("alice")).lease.id
    ops.Release(pb.ReleaseRequest(lease=lease), timeout=GENEROUS_SECONDS)
    ops.Cordon(pb.CordonRequest(gpu="0", reason="fan"), timeout=GENEROUS_SECONDS)
    (event,) = (
        each for each in ops.Events(pb.EventsRequest(), timeout=GENEROUS_SECONDS).events if each.kind == "gpu-cordoned"
    )
    assert (event.data["by"].text, event.data["role"].text) == ("ops", "admin")
    assert "uid" not in event.data


def test_only_those_named_have_a_role_where_some_are(folder: Path, authority: Authority) -> None:
    with serving(folder, authority, "--tls-users", "alice", "--tls-admins", "ops") as agent, ExitStack() as stack:
        for name in ("alice", "ops"):
            stub = stub_of(stack, agent, authority, authority.issue(name))
            assert stub.Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS).node == "tested"
        mallory = stub_of(stack, agent, authority, authority.issue("mallory"))
        calls: list[Callable[[], object]] = [
            lambda: mallory.Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS),
            lambda: mallory.Profiles(pb.ProfilesRequest(), timeout=GENEROUS_SECONDS),
            lambda: mallory.Events(pb.EventsRequest(), timeout=GENEROUS_SECONDS),
            lambda: mallory.Usage(pb.UsageRequest(), timeout=GENEROUS_SECONDS),
            lambda: mallory.Plan(pb.PlanRequest(), timeout=GENEROUS_SECONDS),
            lambda: list(mallory.Watch(pb.WatchRequest(), timeout=GENEROUS_SECONDS)),
            lambda: list(mallory.Hold(pb.HoldRequest(), timeout=GENEROUS_SECONDS)),
            lambda: acquire(mallory),
        ]
        for call in calls:
            assert reason_of(call) == "not-permitted"
        denied = [each for each in agent.ask("events")["events"] if each["kind"] == "access-denied"]
        assert {each["data"]["by"] for each in denied} == {"mallory"}


def test_a_certificate_named_like_a_relayed_process_is_just_a_name(calling: Calling) -> None:
    odd = "unix-abstract:mig-agent.0.1.kept.0123456789abcdef"
    assert acquire(calling(odd)).lease.holder == pb.Holder(tenant=odd, name=odd)
