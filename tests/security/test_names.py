"""Over TCP a client goes by the one common name in its certificate, and by nothing else in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.adapters.grpc_errors import TRAILER
from mig_agent.frontends.grpc.identity import common_name
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.agent import GENEROUS_SECONDS, Agent
from support.certificates import Authority, Pem
from support.tls import channel_to, serving

ROLES = ["--tls-admins", "ops, localhost, 127.0.0.1, ops.example", "--tls-schedulers", "slurm"]
NONE, SEVERAL, UNSEEN = "it has no common name", "it has several common names", "characters in it that cannot be seen"


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder, "clients")


@pytest.fixture
def agent(folder: Path, authority: Authority) -> Iterator[Agent]:
    with serving(folder, authority, *ROLES) as running:
        yield running


@pytest.fixture
def words(agent: Agent, authority: Authority) -> Iterator[Callable[[Pem], str]]:
    """What the agent answers to who wants to be an administrator with a certificate; empty where it is one."""
    with ExitStack() as stack:

        def ask(client: Pem) -> str:
            stub = PartitionManagerStub(stack.enter_context(channel_to(agent, authority, client)))
            try:
                stub.Reclaim(pb.ReclaimRequest(), timeout=GENEROUS_SECONDS)
            except grpc.RpcError as error:
                refused: Any = error
                (detail,) = [value for key, value in refused.trailing_metadata() if key == TRAILER]
                assert pb.RefusalDetail.FromString(detail).reason == "not-permitted"
                return str(refused.details())
            return ""

        yield ask


def test_an_administrator_is_known_by_the_common_name(words: Callable[[Pem], str], authority: Authority) -> None:
    """The control for all that follow."""
    assert words(authority.issue("ops")) == ""
    assert "that is for administrators" in words(authority.issue("alice"))


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ([], NONE),
        ([""], NONE),
        (["alice", "ops"], SEVERAL),
        (["ops", "alice"], SEVERAL),
        (["ops", "ops"], SEVERAL),
        (["ops", ""], SEVERAL),
        (["ops\0.evil.example"], UNSEEN),
        (["ops\n"], UNSEEN),
        (["ops\x9b31m"], UNSEEN),
        (["ops\u202e"], UNSEEN),
        (["o\u200bps"], UNSEEN),
        ([" ops"], UNSEEN),
        (["x" * 257], "longer than 256 bytes"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_is_no_name_gives_no_role(
    names: Sequence[str], fault: str, words: Callable[[Pem], str], authority: Authority, agent: Agent
) -> None:
    """Whatever else is in the certificate: `localhost`, an administrator here, is among its alternative names."""
    client = authority.issue("client", common_names=names, also=["ops.example"], organization="ops, CN=ops")
    assert fault in words(client)
    denied = [each for each in agent.ask("events")["events"] if each["kind"] == "access-denied"]
    assert len(denied) == 1
    assert all(text.isprintable() for text in map(str, denied[0]["data"].values()))


@pytest.mark.parametrize(
    "name", ["a,CN=b", "a+CN=b", 'a"b', "a\\\\,CN=b", "CN=a", "a = b", "jörg", "o" * 200, "#12", "a/CN=b"]
)
def test_a_name_that_looks_like_several_is_one(name: str, words: Callable[[Pem], str], authority: Authority) -> None:
    assert "that is for administrators" in words(authority.issue("client", common_names=[name]))


@pytest.mark.parametrize(
    ("subject", "first", "expected"),
    [
        (b"CN=a", b"a", ("a", "")),
        (b"O=x,CN=a+OU=y", b"a", ("a", "")),
        (b"CN=j\\C3\\B6rg", "jörg".encode(), ("jörg", "")),
        (b"CN=a\\,CN=b", b"a,CN=b", ("a,CN=b", "")),
        (b"O=a\\,CN=b,CN=c", b"c", ("c", "")),
        (b"CN=a\\\\,CN=b", b"b", ("", SEVERAL)),
        (b"OCN=a", b"", ("", NONE)),
        (b"O=CN=a", b"", ("", NONE)),
        (b"", b"a", ("", NONE)),
        (b"CN=a\\00b", b"a", ("", f"its common name has {UNSEEN}")),
        (b"CN=\\FF", b"\xff", ("", f"its common name has {UNSEEN}")),
        (b"CN=#0401", b"\x01", ("", f"its common name has {UNSEEN}")),
    ],
)
def test_the_name_is_read_from_the_subject(subject: bytes, first: bytes, expected: tuple[str, str]) -> None:
    assert common_name({"x509_subject": [subject], "x509_common_name": [first]}) == expected


def test_other_names_are_none() -> None:
    assert common_name({"x509_subject_alternative_name": [b"ops"]}) == ("", NONE)
    assert common_name({}) == ("", NONE)
