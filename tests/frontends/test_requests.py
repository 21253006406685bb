"""From the wire to a request: for which pod a lease is taken counts only from those who act for others."""

from __future__ import annotations

import pytest

from mig_agent.core.errors import Reason, RefusedError, UsageError
from mig_agent.core.model import Holder
from mig_agent.core.owner import TOKEN_OWNER, Pod, PodOwner
from mig_agent.engine.callers import Caller
from mig_agent.frontends.grpc.decode import request_from
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

SCHEDULER = Caller(name="volcano", scheduler=True)
ROOT = Caller(name="root", uid=0, pid=4711, admin=True)
ALICE = Caller(name="alice", uid=1000)
TRAIN = {"namespace": "team-a", "name": "train-7f2c", "uid": "0d3a1b7e-5a1e-4c1c-9b55-6f4f1f2f6b8f"}


def asked(pod: dict[str, str] | None = None, *, tenant: str = "", name: str = "", pid: int | None = None) -> pb.Request:
    holder = pb.Holder(tenant=tenant, name=name, pod=None if pod is None else pb.Pod(**pod))
    return pb.Request(wants=[pb.Want(memory="4G")], holder=holder, pid=pid)


@pytest.mark.parametrize("caller", [SCHEDULER, ROOT])
def test_administrators_and_schedulers_may_request_for_pods(caller: Caller) -> None:
    pod = Pod(**TRAIN)
    request = request_from(asked(TRAIN), caller)
    assert request.holder == Holder(
        tenant="namespace team-a", name="pod team-a/train-7f2c", uid=caller.uid, pid=caller.pid
    )
    assert request.owner == PodOwner(pod=pod)
    given = request_from(asked(TRAIN, tenant="vision", name="the run"), caller)
    assert (given.holder.tenant, given.holder.name, given.owner) == ("vision", "the run", PodOwner(pod=pod))


def test_the_uid_may_be_left_out() -> None:
    request = request_from(asked({**TRAIN, "uid": ""}), SCHEDULER)
    assert request.owner == PodOwner(pod=Pod(namespace="team-a", name="train-7f2c"))


@pytest.mark.parametrize("caller", [ALICE, Caller()])
def test_other_callers_may_not_request_for_pods(caller: Caller) -> None:
    with pytest.raises(RefusedError) as refused:
        request_from(asked(TRAIN), caller)
    refusal = refused.value.refusal
    assert refusal.reason is Reason.NOT_PERMITTED
    assert refusal.message.startswith("cannot ask for pod team-a/train-7f2c: ")
    assert request_from(asked(), caller).owner == TOKEN_OWNER


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"namespace": ""},
        {"name": "Train"},
        {"name": "train_7f2c"},
        {"name": "-train"},
        {"name": "a" * 254},
        {"namespace": "a" * 64},
        {"namespace": "team/a"},
        {"uid": "a" * 65},
        {"uid": "a\nb"},
    ],
)
def test_invalid_pod_is_refused_with_a_message(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"cannot take .* of a pod"):
        request_from(asked({**TRAIN, **wrong}), SCHEDULER)


def test_lease_for_a_pod_has_no_process() -> None:
    with pytest.raises(UsageError, match="cannot bind the lease of pod team-a/train-7f2c to process 7"):
        request_from(asked(TRAIN, pid=7), ROOT)
    assert request_from(asked(), ROOT).owner == TOKEN_OWNER
