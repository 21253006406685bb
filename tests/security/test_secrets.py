"""Tokens are told to their holders and to nobody else, wherever one looks."""

from __future__ import annotations

import re
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.adapters.tokens import KEY_FILE, Tokens
from mig_agent.core.model import LeaseId
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.acquire import granted as granted_to
from support.agent import GENEROUS_SECONDS, Agent

TOKEN = re.compile(r"[0-9a-f]{64}")


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    with Agent(folder, flags=["--log-level", "debug", "--metrics", "127.0.0.1:0"]) as running:
        yield running


def metrics_of(agent: Agent) -> str:
    address = re.search(r"127\.0\.0\.1:[0-9]+", str(agent.serving()["metrics"]))
    assert address is not None
    with urllib.request.urlopen(f"http://{address[0]}/metrics", timeout=GENEROUS_SECONDS) as answer:
        return str(answer.read().decode())


def be_busy(stub: PartitionManagerStub, admin: PartitionManagerStub) -> list[str]:
    """All that an agent does for people, mistakes included; the tokens that were handed out."""
    tokens = []
    for number in range(12):
        request = pb.Request(wants=[pb.Want(memory="4G")], request_id=f"request-{number}", ttl_seconds=600.0)
        granted = granted_to(stub, request, GENEROUS_SECONDS)
        again = granted_to(stub, request, GENEROUS_SECONDS)
        assert again.token == granted.token
        tokens.append(granted.token)
        lease = granted.lease.id
        stub.Renew(pb.RenewRequest(lease=lease, token=granted.token, ttl_seconds=60.0), timeout=GENEROUS_SECONDS)
        for wrong in (granted.token[::-1], tokens[0] if number else "x", granted.token + "0"):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Release(pb.ReleaseRequest(lease=lease, token=wrong), timeout=GENEROUS_SECONDS)
            assert wrong not in str(caught.value) or wrong == "x"
        with pytest.raises(grpc.RpcError):  # a token in the wrong field
            stub.Release(pb.ReleaseRequest(lease=granted.token, token=lease), timeout=GENEROUS_SECONDS)
        if number % 3 == 0:
            stub.Release(pb.ReleaseRequest(lease=lease, token=granted.token), timeout=GENEROUS_SECONDS)
            stub.Release(pb.ReleaseRequest(lease=lease, token=granted.token), timeout=GENEROUS_SECONDS)
        elif number % 3 == 1:
            admin.Release(pb.ReleaseRequest(lease=lease), timeout=GENEROUS_SECONDS)
    return tokens


def test_no_token_is_found_anywhere_but_with_its_holder(agent: Agent, folder: Path) -> None:
    with (
        grpc.insecure_channel(agent.address) as users,
        grpc.insecure_channel(f"unix:{folder}/admin.sock") as admins,
    ):
        stub, admin = PartitionManagerStub(users), PartitionManagerStub(admins)
        watching = stub.Watch(pb.WatchRequest(), timeout=GENEROUS_SECONDS)
        assert next(watching).revision
        tokens = be_busy(stub, admin)
        heard = []
        for message in watching:
            heard.append(str(message))
            if message.event.kind == "lease-ended":
                break
        told = [str(admin.Status(pb.StatusRequest())), str(admin.Events(pb.EventsRequest())), *heard]
        told += [metrics_of(agent), str(admin.Profiles(pb.ProfilesRequest())), str(admin.Usage(pb.UsageRequest()))]
        watching.cancel()
    assert agent.stop() == 0
    key = (agent.state_dir / KEY_FILE).read_bytes()
    log = agent.log()
    assert '"level": "debug"' in log
    assert "lease-renewed" in log
    ledger = b"".join(each.read_bytes() for each in agent.state_dir.glob(f"{LEDGER_FILE}*"))
    assert b"request-3" in ledger
    # The reversed ones are what wrong guesses look like: they are not repeated to anybody either.
    for token in (*tokens, *(each[::-1] for each in tokens)):
        assert token not in log
        assert token.encode() not in ledger
        assert not [each for each in told if token in each]
    for secret in (key, key.hex().encode()):
        assert secret not in ledger
        assert secret not in log.encode()
    assert not [each for each in told if key.hex() in each]
    kept = [path for path in agent.state_dir.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert not [path for path in kept if path.name.startswith((LEDGER_FILE, KEY_FILE))]


def test_reflection_tells_of_the_api_and_nothing_else(agent: Agent) -> None:
    asked = ["mig", "migagent.v1.PartitionManager", "grpc.health.v1.Health"]
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=each) for each in asked]
    with grpc.insecure_channel(agent.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = list(stub.ServerReflectionInfo(iter(requests), timeout=GENEROUS_SECONDS))
    names = {each.name for each in answers[0].list_services_response.service}
    assert names == {
        "migagent.v1.PartitionManager",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(each)
        for answer in answers[1:]
        for each in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert {each.package for each in files} == {"migagent.v1", "grpc.health.v1"}


def test_metrics_tell_which_lease_holds_what_and_no_more(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G")
    text = metrics_of(agent)
    assert f'lease="{lease["lease"]}"' in text
    assert not TOKEN.search(text)
    assert lease["request_id"] not in text


def test_a_token_is_right_for_its_lease_under_its_key_alone() -> None:
    ours, theirs = Tokens(secrets.token_bytes(32)), Tokens(secrets.token_bytes(32))
    one, other = LeaseId("0123456789abcdef"), LeaseId("0123456789abcdee")
    token = ours.token(one)
    assert TOKEN.fullmatch(token)
    assert ours.matches(one, token)
    for wrong in ("", token[:-1], token + "0", token.upper(), theirs.token(one), ours.token(other), "\udcff" * 64):
        assert not ours.matches(one, wrong)
