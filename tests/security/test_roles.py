"""Who may call what: every row of the table in docs/security.md, by every kind of caller, over TCP and Unix sockets."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.adapters.grpc_errors import TRAILER
from mig_agent.frontends.grpc.handlers import SERVICE
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.acquire import granted as granted_to
from support.agent import GENEROUS_SECONDS, Agent, short_folder
from support.certificates import Authority
from support.people import ALICE, needs_root, person
from support.tls import channel_to, serving

PAGE = Path(__file__).resolve().parents[2] / "docs/security.md"
COLUMNS = ("no role", "user", "scheduler", "administrator")
CALLERS = {
    "mallory over TCP": "no role",
    "alice over TCP": "user",
    "slurm over TCP": "scheduler",
    "ops over TCP": "administrator",
    "a user of the machine": "user",
    "the agent's own user": "scheduler",
    "the administrators' socket": "administrator",
}
"""Each with its column."""
DENIALS = {"not-permitted", "wrong-token"}
FLAGS = ("--tls-users", "alice", "--tls-schedulers", "slurm, kai", "--tls-admins", "ops", "--socket-mode", "0666")

Case = tuple[str, str]
"""A method, and what the table says behind it."""


def table() -> dict[Case, dict[str, bool]]:
    """Of the page: for each case, whether each column may."""
    found = {}
    row = re.compile(
        r"^\| (?P<methods>`\w+`(?:, `\w+`)*)(?P<words>[^|]*)\|(?P<may>(?: (?:yes|no) \|){4})$", re.MULTILINE
    )
    for each in row.finditer(PAGE.read_text()):
        may = dict(zip(COLUMNS, (cell == "yes" for cell in re.findall("yes|no", each["may"])), strict=True))
        for method in re.findall(r"`(\w+)`", each["methods"]):
            case = (method, each["words"].strip())
            assert case not in found
            found[case] = may
    return found


def wanting(**holder: Any) -> pb.Request:
    want = pb.Want(profile="1g.5gb")
    return pb.Request(wants=[want], request_id=uuid.uuid4().hex, ttl_seconds=300, holder=pb.Holder(**holder))


FOR: Mapping[str, dict[str, Any]] = {
    "for itself": {},
    "for another tenant": {"tenant": "team-a"},
    "for a pod": {"pod": pb.Pod(namespace="team-a", name="train", uid="7f2c")},
}


MESSAGES: Mapping[str, Any] = {
    "Adopt": pb.AdoptRequest(all=True),
    "Cancel": pb.CancelRequest(mine=True),
    "Cordon": pb.CordonRequest(gpu="0", uncordon=True),
    "Drain": pb.DrainRequest(undrain=True),
    "SetMigMode": pb.SetMigModeRequest(gpu="1", mode=pb.MIG_MODE_TARGET_ENABLED),
}
"""What is sent where an empty message would be refused, or would do more than is undone."""


@dataclass(frozen=True)
class Calls:
    """What each case does. `admin` makes what it needs, and undoes what it did."""

    stub: PartitionManagerStub
    admin: PartitionManagerStub
    other: PartitionManagerStub
    """Another scheduler."""

    def make(self, method: str, words: str) -> None:
        """Raises grpc.RpcError."""
        match method:
            case "Plan":
                self.stub.Plan(pb.PlanRequest(requests=[wanting(**FOR[words])]), timeout=GENEROUS_SECONDS)
            case "Acquire":
                self.undo(granted(self.stub, wanting(**FOR[words])))
            case "Hold":
                stream = self.stub.Hold(pb.HoldRequest(request=self.held(words)), timeout=GENEROUS_SECONDS)
                assert any(each.HasField("granted") for each in stream_until(stream, "granted"))
                stream.cancel()
            case "Release" | "Renew" | "Recover":
                self.change(method, with_token=words != "of another's lease, without it", force=words == "by force")
            case "Watch":
                watching = self.stub.Watch(pb.WatchRequest(), timeout=GENEROUS_SECONDS)
                next(iter(watching))
                watching.cancel()
            case "Pause":
                self.stub.Pause(pb.PauseRequest(reason="a test"), timeout=GENEROUS_SECONDS)
                self.admin.Resume(pb.ResumeRequest(), timeout=GENEROUS_SECONDS)
            case _:
                request = MESSAGES.get(method) or getattr(pb, f"{method}Request")()
                getattr(self.stub, method)(request, timeout=GENEROUS_SECONDS)

    @staticmethod
    def held(words: str) -> pb.Request:
        """A held lease has no deadline of its own."""
        request = wanting(**FOR[words])
        request.ClearField("ttl_seconds")
        return request

    def change(self, method: str, *, with_token: bool, force: bool) -> None:
        """Of a lease that another scheduler has."""
        lease = granted(self.other, wanting(tenant="team-b"))
        token = lease.token if with_token else ""
        try:
            if method == "Release":
                release = pb.ReleaseRequest(lease=lease.lease.id, token=token, force=force)
                self.stub.Release(release, timeout=GENEROUS_SECONDS)
            elif method == "Recover":
                self.stub.Recover(pb.RecoverRequest(lease=lease.lease.id, token=token), timeout=GENEROUS_SECONDS)
            else:
                renew = pb.RenewRequest(lease=lease.lease.id, token=token, ttl_seconds=60)
                self.stub.Renew(renew, timeout=GENEROUS_SECONDS)
        finally:
            self.undo(lease)

    def undo(self, lease: pb.Granted) -> None:
        """Releasing what was released is no error with its token."""
        release = pb.ReleaseRequest(lease=lease.lease.id, token=lease.token)
        self.admin.Release(release, timeout=GENEROUS_SECONDS)


def granted(stub: PartitionManagerStub, request: pb.Request) -> pb.Granted:
    return granted_to(stub, request, GENEROUS_SECONDS)


def stream_until(stream: Any, field: str) -> Iterator[Any]:
    for each in stream:
        yield each
        if each.HasField(field):
            return


def reason_of(call: Callable[[], object]) -> str:
    """Why it was refused; empty where it was not."""
    try:
        call()
    except grpc.RpcError as caught:
        error: Any = caught
        details = [value for key, value in error.trailing_metadata() or () if key == TRAILER]
        assert details, error
        return pb.RefusalDetail.FromString(details[0]).reason
    return ""


@pytest.fixture(scope="module")
def stubs() -> Iterator[Callable[[str], PartitionManagerStub]]:
    """By the name of a caller; all of one agent."""
    with short_folder() as folder:
        folder.chmod(0o711)  # the socket's mode alone decides
        yield from _stubs(folder)


def _stubs(folder: Path) -> Iterator[Callable[[str], PartitionManagerStub]]:
    authority = Authority(folder, "clients")
    agent = serving(folder, authority, *FLAGS)
    known: dict[str, PartitionManagerStub] = {}
    with ExitStack() as stack:
        stack.enter_context(agent)

        def stub_of(caller: str) -> PartitionManagerStub:
            if caller not in known:
                known[caller] = opened(stack, agent, authority, caller)
            return known[caller]

        yield stub_of


def opened(stack: ExitStack, agent: Agent, authority: Authority, caller: str) -> PartitionManagerStub:
    name, over, _ = caller.partition(" over TCP")
    if over:
        return PartitionManagerStub(stack.enter_context(channel_to(agent, authority, authority.issue(name))))
    if caller == "a user of the machine":
        return stack.enter_context(person(ALICE, agent.socket, agent.folder))
    socket = agent.socket if caller == "the agent's own user" else agent.socket.with_name("admin.sock")
    return PartitionManagerStub(stack.enter_context(grpc.insecure_channel(f"unix:{socket}")))


TABLE: Mapping[Case, Mapping[str, bool]] = table()


def test_every_method_has_its_row() -> None:
    """A new one has to be decided before it is there."""
    assert {method for method, _ in TABLE} == {each.name for each in SERVICE.methods}


@pytest.mark.parametrize("case", TABLE, ids=" ".join)
@pytest.mark.parametrize(
    "caller",
    [pytest.param(each, marks=needs_root if each == "a user of the machine" else ()) for each in CALLERS],
)
def test_the_table(caller: str, case: Case, stubs: Callable[[str], PartitionManagerStub]) -> None:
    calls = Calls(stubs(caller), admin=stubs("ops over TCP"), other=stubs("kai over TCP"))
    reason = reason_of(lambda: calls.make(*case))
    if TABLE[case][CALLERS[caller]]:
        # What it may is done, and not only refused for another reason.
        assert reason == ""
    else:
        assert reason in DENIALS


def test_another_callers_request_gives_a_lease_of_ones_own(stubs: Callable[[str], PartitionManagerStub]) -> None:
    """The id of a request may be known, such as a pod's UID: what it leads to is each caller's own."""
    request = wanting(**FOR["for a pod"])
    callers = ("the agent's own user", "slurm over TCP", "kai over TCP", "ops over TCP")
    leases = {caller: granted(stubs(caller), request) for caller in callers}
    assert len({each.lease.id for each in leases.values()}) == len(callers)
    # The agent's own user is the same one on the administrators' socket.
    again = {**{caller: caller for caller in callers}, "the administrators' socket": "the agent's own user"}
    for caller, first in again.items():
        assert granted(stubs(caller), request).token == leases[first].token
    for each in leases.values():
        stubs("ops over TCP").Release(pb.ReleaseRequest(lease=each.lease.id), timeout=GENEROUS_SECONDS)


def test_the_record_names_the_certificate(stubs: Callable[[str], PartitionManagerStub]) -> None:
    admin, slurm = stubs("ops over TCP"), stubs("slurm over TCP")
    lease = granted(slurm, wanting(tenant="team-a", name="job 7")).lease.id
    assert reason_of(lambda: slurm.Cordon(pb.CordonRequest(gpu="0"), timeout=GENEROUS_SECONDS)) == "not-permitted"
    admin.Release(pb.ReleaseRequest(lease=lease), timeout=GENEROUS_SECONDS)
    events = admin.Events(pb.EventsRequest(), timeout=GENEROUS_SECONDS).events
    by = {(each.kind, each.data["by"].text, each.data["role"].text) for each in events if each.lease == lease}
    assert ("lease-granted", "slurm", "scheduler") in by
    assert ("lease-ended", "ops", "admin") in by
    # Of many refusals of one caller only the first are recorded.
    denied = [each for each in events if each.kind == "access-denied" and each.data["method"].text == "Cordon"]
    assert ("slurm", "scheduler") in {(each.data["by"].text, each.data["role"].text) for each in denied}
