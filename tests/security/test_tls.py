"""TCP: TLS 1.2 or newer with a certificate of the right authority, whose name says what its holder may do."""

from __future__ import annotations

import json
import socket
import ssl
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.adapters.grpcerrors import TRAILER
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.agent import GENEROUS_SECONDS, Agent
from support.certificates import Authority, Pem

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2 says first, with empty SETTINGS (RFC 9113, 3.4)."""
ROLES = ["--tls-admins", "ops, root-ops", "--tls-schedulers", "slurm"]


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "clients")


def serving(folder: Path, authority: Authority, *flags: str) -> Agent:
    server = authority.issue("server")
    tls = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
    return Agent(folder, flags=[*tls, *flags], listen=[f"unix://{folder}/agent.sock", "127.0.0.1:0"])


@pytest.fixture
def agent(folder: Path, authority: Authority) -> Iterator[Agent]:
    with serving(folder, authority, *ROLES) as running:
        yield running


def port_of(agent: Agent) -> int:
    line = next(each for each in map(json.loads, agent.log().splitlines()) if each["event"] == "serving")
    return int(line["listen"][1].rpartition(":")[2])


Calling = Callable[[str], PartitionManagerStub]


@pytest.fixture
def calling(agent: Agent, authority: Authority) -> Iterator[Calling]:
    """A stub with a certificate of this name."""
    with ExitStack() as stack:
        yield lambda name: stub_of(stack, agent, authority, authority.issue(name))


def stub_of(stack: ExitStack, agent: Agent, authority: Authority, client: Pem) -> PartitionManagerStub:
    credentials = grpc.ssl_channel_credentials(
        authority.ca.read_bytes(), client.key.read_bytes(), client.cert.read_bytes()
    )
    channel = grpc.secure_channel(f"127.0.0.1:{port_of(agent)}", credentials)
    return PartitionManagerStub(stack.enter_context(channel))


def acquire(stub: PartitionManagerStub, *, tenant: str = "", name: str = "") -> pb.Granted:
    request = pb.Request(wants=[pb.Want(memory="4G")], holder=pb.Holder(tenant=tenant, name=name))
    return list(stub.Acquire(pb.AcquireRequest(request=request), timeout=GENEROUS_SECONDS))[-1].granted


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return next(pb.RefusalDetail.FromString(value).reason for key, value in error.trailing_metadata() if key == TRAILER)


# Handshakes, made by another implementation than gRPC's


def shake(agent: Agent, context: ssl.SSLContext) -> str | None:
    """The version of TLS that both sides agree on. Raises OSError where they do not."""
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    address = ("127.0.0.1", port_of(agent))
    with (
        socket.create_connection(address, GENEROUS_SECONDS) as plain,
        context.wrap_socket(plain) as connection,
    ):
        # In TLS 1.3 the server judges the client's certificate after the client is done: its verdict comes here.
        connection.sendall(PREFACE)
        if not connection.recv(1):
            raise ConnectionError("closed after the handshake")
        return connection.version()


def client_context(
    authority: Authority, client: Pem | None, version: ssl.TLSVersion, *, trusting: bool = True
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.ca)
    if not trusting:
        context.verify_mode = ssl.CERT_NONE
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    context.set_ciphers("ALL:@SECLEVEL=0")  # nothing on our side shall stand in the way
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    return context


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
