"""On a shared machine: who asks is whom the kernel names, and nobody touches what another holds."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.adapters.grpc_errors import TRAILER
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.acquire import asking
from support.acquire import granted as granted_to
from support.agent import GENEROUS_SECONDS, Agent, eventually
from support.people import ALICE, BOB, NOBODY, as_user, needs_root, person

pytestmark = needs_root
NAMED = 1
"""`daemon` on the machines that we know: a user with a name."""
As = Callable[[int], PartitionManagerStub]


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    folder.chmod(0o711)  # the socket's mode alone decides
    with Agent(folder, flags=["--socket-mode", "0666", "--socket-schedulers", str(BOB + 1)]) as running:
        yield running


@pytest.fixture
def calls_as(agent: Agent, folder: Path) -> Iterator[As]:
    with contextlib.ExitStack() as stack:
        known: dict[int, PartitionManagerStub] = {}

        def stub_of(uid: int) -> PartitionManagerStub:
            if uid not in known:
                known[uid] = stack.enter_context(person(uid, agent.socket, folder))
            return known[uid]

        yield stub_of


@pytest.fixture
def admin(folder: Path, agent: Agent) -> Iterator[PartitionManagerStub]:
    assert agent.process is not None
    with grpc.insecure_channel(f"unix:{folder}/admin.sock") as channel:
        yield PartitionManagerStub(channel)


def wanting(**fields: Any) -> pb.Request:
    fields.setdefault("request_id", uuid.uuid4().hex)
    return pb.Request(wants=[pb.Want(memory="4G")], **fields)


def acquire(stub: PartitionManagerStub, **fields: Any) -> pb.Granted:
    return granted_to(stub, wanting(**fields), GENEROUS_SECONDS)


def status(stub: PartitionManagerStub) -> pb.StatusResponse:
    answer: pb.StatusResponse = stub.Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS)
    return answer


@contextlib.contextmanager
def refused(reason: str, words: str = "") -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error: Any = caught.value
    details = [value for key, value in error.trailing_metadata() if key == TRAILER]
    assert details, error
    detail = pb.RefusalDetail.FromString(details[0])
    assert detail.reason == reason, detail
    assert words in detail.message, detail


def release(stub: PartitionManagerStub, lease: str, token: str = "") -> None:
    stub.Release(pb.ReleaseRequest(lease=lease, token=token), timeout=GENEROUS_SECONDS)


def renew(stub: PartitionManagerStub, lease: str, token: str = "") -> None:
    stub.Renew(pb.RenewRequest(lease=lease, token=token, ttl_seconds=60.0), timeout=GENEROUS_SECONDS)


def test_a_lease_is_its_users_by_name_number_and_process(calls_as: As) -> None:
    name = pwd.getpwuid(NAMED).pw_name
    for uid, called in ((NAMED, name), (ALICE, f"uid {ALICE}")):
        holder = acquire(calls_as(uid)).lease.holder
        assert holder == pb.Holder(tenant=called, name=called, uid=uid, pid=os.getpid())
        assert holder in [each.holder for each in status(calls_as(BOB)).leases]


def test_what_a_request_says_of_its_holder_does_not_make_it_so(calls_as: As) -> None:
    own = f"uid {ALICE}"
    with refused("not-permitted", "cannot ask for tenant uid 60002"):
        acquire(calls_as(ALICE), holder=pb.Holder(tenant=f"uid {BOB}"))
    with refused("not-permitted"):
        acquire(calls_as(ALICE), holder=pb.Holder(tenant="root"))
    with refused("not-permitted", "cannot ask for pod team-a/train"):
        acquire(calls_as(ALICE), holder=pb.Holder(pod=pb.Pod(namespace="team-a", name="train")))
    granted = acquire(calls_as(ALICE), holder=pb.Holder(tenant=own, name="root", uid=0, pid=1))
    assert granted.lease.holder == pb.Holder(tenant=own, name=f"{own} (root)", uid=ALICE, pid=os.getpid())


def test_root_and_schedulers_act_for_others(calls_as: As) -> None:
    for uid in (0, BOB + 1):
        holder = acquire(calls_as(uid), holder=pb.Holder(tenant="team-a", name="pod x")).lease.holder
        assert holder == pb.Holder(tenant="team-a", name="pod x", uid=uid, pid=os.getpid())


def test_without_its_token_nobody_else_changes_a_lease(calls_as: As) -> None:
    granted = acquire(calls_as(ALICE))
    lease = granted.lease.id
    another = acquire(calls_as(BOB))
    for token in ("", "x", another.token, granted.token[:-1], granted.token + "0", granted.token.upper() + " "):
        with refused("wrong-token", f"cannot touch lease {lease}"):
            release(calls_as(BOB), lease, token)
        with refused("wrong-token", f"cannot touch lease {lease}"):
            renew(calls_as(BOB), lease, token)
    assert {each.id for each in status(calls_as(ALICE)).leases} == {lease, another.lease.id}
    renew(calls_as(BOB), lease, granted.token)  # who was given the token may
    release(calls_as(BOB), lease, granted.token)


def test_who_may_not_change_a_lease_learns_whose_it_is(calls_as: As) -> None:
    lease = acquire(calls_as(ALICE)).lease.id
    (held,) = status(calls_as(BOB)).leases
    with refused("wrong-token", f"cannot touch lease {lease}: it is held by {held.holder.name}"):
        release(calls_as(BOB), lease)
    with refused("wrong-token", f"the token is not its token; it is held by {held.holder.name}"):
        renew(calls_as(BOB), lease, "x")


def test_who_asked_for_a_lease_needs_no_token_and_an_administrator_none_either(
    calls_as: As, admin: PartitionManagerStub
) -> None:
    mine, theirs = acquire(calls_as(ALICE)).lease.id, acquire(calls_as(BOB)).lease.id
    renew(calls_as(ALICE), mine)
    release(calls_as(ALICE), mine)
    release(calls_as(ALICE), mine)  # again is no mistake
    with refused("wrong-token"):
        release(calls_as(ALICE), theirs)
    release(admin, theirs)


def test_it_outlives_the_agent(agent: Agent, calls_as: As) -> None:
    lease = acquire(calls_as(ALICE)).lease.id
    agent.restart_after_crash()
    eventually(lambda: _answers(calls_as(ALICE)))
    eventually(lambda: _answers(calls_as(BOB)))
    with refused("wrong-token"):
        release(calls_as(BOB), lease)
    release(calls_as(ALICE), lease)


def _answers(stub: PartitionManagerStub) -> bool:
    try:
        return bool(status(stub).node)
    except grpc.RpcError:
        return False


def test_the_id_of_a_request_is_told_to_who_made_it_alone(calls_as: As, admin: PartitionManagerStub) -> None:
    """It is nobody's business; and who has it and asks with it gets a lease of their own, not that one's token."""
    granted = acquire(calls_as(ALICE), request_id="secret-id")
    assert [each.request_id for each in status(calls_as(ALICE)).leases] == ["secret-id"]
    assert [each.request_id for each in status(admin).leases] == ["secret-id"]
    assert [each.request_id for each in status(calls_as(BOB)).leases] == [""]
    assert acquire(calls_as(ALICE), request_id="secret-id").token == granted.token
    for uid in (BOB, 0):
        own = acquire(calls_as(uid), request_id="secret-id")
        assert own.token != granted.token
        release(calls_as(uid), own.lease.id)
    waiting = calls_as(ALICE).Acquire(
        asking(
            pb.Request(
                wants=[pb.Want(profile="7g.40gb")], request_id="waits", gpus=["0"], wait_seconds=GENEROUS_SECONDS
            )
        )
    )
    eventually(lambda: status(admin).queue)
    assert [each.request_id for each in status(calls_as(BOB)).queue] == [""]
    assert [each.request_id for each in status(calls_as(ALICE)).queue] == ["waits"]
    waiting.cancel()


def test_users_without_a_number_of_their_own_are_not_taken_for_one_another(calls_as: As) -> None:
    """All users of other user namespaces look like `nobody` from here."""
    granted = acquire(calls_as(NOBODY))
    assert granted.lease.holder.tenant == ""
    assert not granted.lease.holder.HasField("uid")
    with refused("not-permitted"):
        release(calls_as(NOBODY), granted.lease.id)
    release(calls_as(NOBODY), granted.lease.id, granted.token)


def test_on_the_users_socket_nobody_is_an_administrator(calls_as: As) -> None:
    for uid in (ALICE, 0):
        stub = calls_as(uid)
        with refused("not-permitted", "for administrators"):
            stub.Reclaim(pb.ReclaimRequest(), timeout=GENEROUS_SECONDS)
        with refused("not-permitted", "for administrators"):
            stub.Cordon(pb.CordonRequest(gpu="0"), timeout=GENEROUS_SECONDS)
        with refused("not-permitted", "for administrators"):
            stub.SetMigMode(pb.SetMigModeRequest(gpu="0", mode=pb.MIG_MODE_TARGET_DISABLED), timeout=GENEROUS_SECONDS)


def test_who_did_what_is_recorded(calls_as: As, admin: PartitionManagerStub) -> None:
    granted = acquire(calls_as(ALICE))
    lease = granted.lease.id
    with refused("wrong-token"):
        release(calls_as(BOB), lease, "wrong")
    with refused("not-permitted"):
        calls_as(BOB).Cordon(pb.CordonRequest(gpu="1"), timeout=GENEROUS_SECONDS)
    renew(calls_as(ALICE), lease)
    release(admin, lease)
    admin.Cordon(pb.CordonRequest(gpu="1", reason="fan"), timeout=GENEROUS_SECONDS)
    admin.Reclaim(pb.ReclaimRequest(), timeout=GENEROUS_SECONDS)
    found = admin.Events(pb.EventsRequest(), timeout=GENEROUS_SECONDS).events
    told = [
        (each.kind, each.data["uid"].integer, each.data["role"].text, each.data["pid"].integer, each.lease)
        for each in found
        if "uid" in each.data
    ]
    me = os.getpid()
    assert told == [
        ("lease-granted", ALICE, "user", me, lease),
        ("access-denied", BOB, "user", me, ""),
        ("access-denied", BOB, "user", me, ""),
        ("lease-renewed", ALICE, "user", me, lease),
        ("lease-ended", 0, "admin", me, lease),
        ("gpu-cordoned", 0, "admin", me, ""),
        ("instance-destroyed", 0, "admin", me, ""),
    ]
    denied = [each for each in found if each.kind == "access-denied"]
    assert [(each.data["method"].text, each.data["about"].text) for each in denied] == [
        ("Release", lease),
        ("Cordon", "1"),
    ]
    assert f"uid {BOB}" in denied[0].message


def test_a_socket_that_a_user_may_not_open_answers_nothing(agent: Agent, folder: Path) -> None:
    def connect(path: Path) -> Callable[[], None]:
        def call() -> None:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))

        return call

    as_user(ALICE, connect(agent.socket))
    (agent.state_dir).chmod(0o755)  # even then: the folder of the inner sockets is closed
    for path in (folder / "admin.sock", agent.state_dir / "sockets" / "users", agent.state_dir / "sockets" / "admins"):
        assert path.is_socket()
        with pytest.raises(PermissionError):
            as_user(ALICE, connect(path))


def test_no_abstract_socket_of_the_agent_listens(agent: Agent, calls_as: As) -> None:
    """An abstract name has no permissions: whoever could connect to one would choose who they are."""
    status(calls_as(ALICE))
    listening = 0x10000  # __SO_ACCEPTCON in the flags of /proc/net/unix
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = [line[7] for line in lines if len(line) > 7 and int(line[3], 16) & listening]
    assert not [name for name in names if name.startswith("@mig-agent")]
    assert str(agent.socket) in names
