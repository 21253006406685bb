"""The end of a pod's lease by the API server's answers: all cases of the pure part."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters.kubeapi import PodFacts
from mig_agent.core.model import Generation, Holder, Lease, LeaseId, RequestId
from mig_agent.core.owner import TOKEN_OWNER, KubeletDevice, Pod, PodOwner
from mig_agent.frontends.kubernetes.pods.api_evidence import (
    ASK,
    UNCHANGED,
    Bound,
    Ended,
    Verdict,
    by_answer,
    by_watch,
    pod_of,
)
from support.owners import bound

NODE = "n1"
TAKEN = 1000.0
ARRIVAL = 600.0
POD = Pod(namespace="team-a", name="train", uid="u-1")
NAMED = replace(POD, uid="")
DEVICE = KubeletDevice(resource="nvidia.com/mig-1g.10gb", id="mig-agent-0")
KEPT = Lease(
    id=LeaseId("l-1"),
    request_id=RequestId("r-1"),
    holder=Holder(tenant="namespace team-a"),
    owner=PodOwner(pod=POD),
    instances=(Generation(1),),
    created_at=TAKEN,
)
"""Promised, and confirmed without a deadline."""
SHORT = replace(KEPT, expires_at=TAKEN + 60)
ARRIVED = replace(KEPT, owner=bound(POD))
SERVED = replace(KEPT, owner=bound(POD, (DEVICE,)))
UNNAMED = replace(KEPT, owner=PodOwner(pod=NAMED))
UNNAMED_SHORT = replace(UNNAMED, expires_at=TAKEN + 60)
HERE = PodFacts(namespace="team-a", name="train", uid="u-1", phase="Pending", node=NODE)
OVER = replace(HERE, phase="Succeeded")
UNBOUND = replace(HERE, node="")
ELSEWHERE = replace(HERE, node="n2")
ANOTHER = replace(HERE, uid="u-2")
GOING = replace(HERE, deleting=True)
CAME = Bound(pod=POD)


def watched(lease: Lease, facts: PodFacts | None) -> Verdict:
    pods = {} if facts is None else {(facts.namespace, facts.name): facts}
    return by_watch(lease, pods)


@pytest.mark.parametrize(
    ("lease", "facts", "expected"),
    [
        (KEPT, HERE, CAME),
        (SHORT, HERE, CAME),
        (UNNAMED, HERE, CAME),
        (KEPT, GOING, CAME),
        (ARRIVED, HERE, UNCHANGED),
        (SERVED, HERE, UNCHANGED),
        (KEPT, OVER, Ended(words="its pod has ended")),
        (SHORT, OVER, Ended(words="its pod has ended")),
        (ARRIVED, OVER, Ended(words="its pod has ended")),
        (SERVED, OVER, Ended(words="its pod has ended")),
        (SHORT, None, UNCHANGED),
        (UNNAMED_SHORT, OVER, UNCHANGED),
        (KEPT, None, ASK),
        (UNNAMED, None, ASK),
        (UNNAMED, OVER, ASK),
        (ARRIVED, None, ASK),
        (SERVED, None, ASK),
        (KEPT, ANOTHER, ASK),
        (SHORT, ANOTHER, ASK),
        (ARRIVED, ANOTHER, ASK),
        (ARRIVED, replace(ANOTHER, phase="Failed"), ASK),
    ],
)
def test_verdict_by_the_watch(lease: Lease, facts: PodFacts | None, expected: Verdict) -> None:
    assert watched(lease, facts) == expected


@pytest.mark.parametrize(
    ("lease", "facts", "late", "expected"),
    [
        (KEPT, HERE, False, CAME),
        (SHORT, HERE, False, CAME),
        (UNNAMED, HERE, False, CAME),
        (ARRIVED, HERE, True, UNCHANGED),
        (ARRIVED, UNBOUND, True, UNCHANGED),
        (SERVED, HERE, True, UNCHANGED),
        (KEPT, None, False, Ended(words="its pod is gone")),
        (SHORT, None, False, Ended(words="its pod is gone")),
        (ARRIVED, None, False, Ended(words="its pod is gone")),
        (KEPT, ANOTHER, False, Ended(words="its pod is gone")),
        (ARRIVED, ANOTHER, False, Ended(words="its pod is gone")),
        (KEPT, OVER, False, Ended(words="its pod has ended")),
        (ARRIVED, OVER, False, Ended(words="its pod has ended")),
        (KEPT, ELSEWHERE, False, Ended(words="its pod is on node n2")),
        (SHORT, ELSEWHERE, False, Ended(words="its pod is on node n2")),
        (UNNAMED, ELSEWHERE, False, Ended(words="its pod is on node n2")),
        (KEPT, UNBOUND, False, UNCHANGED),
        (KEPT, UNBOUND, True, Ended(words="its pod has not come in 10m")),
        (SHORT, UNBOUND, True, UNCHANGED),
        (UNNAMED, None, False, UNCHANGED),
        (UNNAMED, None, True, Ended(words="its pod has not come in 10m")),
        (UNNAMED, OVER, False, UNCHANGED),
        (UNNAMED, OVER, True, Ended(words="its pod has not come in 10m")),
        (UNNAMED_SHORT, None, True, UNCHANGED),
    ],
)
def test_verdict_by_the_api_servers_answer(lease: Lease, facts: PodFacts | None, late: bool, expected: Verdict) -> None:
    now = TAKEN + (ARRIVAL if late else ARRIVAL - 1)
    assert by_answer(lease, facts, NODE, now, ARRIVAL) == expected


def test_a_static_pod_is_known_by_the_kubelets_uid_too() -> None:
    mirror = replace(HERE, uid="u-9", static_uid="u-1")
    assert watched(ARRIVED, mirror) == UNCHANGED
    assert by_answer(ARRIVED, mirror, NODE, TAKEN, ARRIVAL) == UNCHANGED


def test_lease_without_a_pod_raises_value_error() -> None:
    with pytest.raises(ValueError, match="cannot follow the pod of lease l-1"):
        pod_of(replace(KEPT, owner=TOKEN_OWNER))


LEASES = st.sampled_from([KEPT, SHORT, ARRIVED, SERVED, UNNAMED, UNNAMED_SHORT])
FACTS = st.none() | st.builds(
    PodFacts,
    namespace=st.just("team-a"),
    name=st.just("train"),
    uid=st.sampled_from(["u-1", "u-2"]),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
    node=st.sampled_from(["", NODE, "n2"]),
    deleting=st.booleans(),
)
MOMENTS = st.floats(0, 10 * ARRIVAL).map(lambda after: TAKEN + after)


@given(lease=LEASES, facts=FACTS, now=MOMENTS)
def test_a_pod_that_runs_here_never_loses_its_lease(lease: Lease, facts: PodFacts | None, now: float) -> None:
    own = facts is not None and not facts.finished and (facts.uid == "u-1" or not pod_of(lease).uid)
    if facts is not None and own and facts.node == NODE:
        for verdict in (watched(lease, facts), by_answer(lease, facts, NODE, now, ARRIVAL)):
            assert verdict == (UNCHANGED if lease.owner.is_bound else Bound(pod=replace(POD, uid=facts.uid)))


@given(lease=LEASES, facts=FACTS)
def test_a_watch_alone_ends_a_lease_only_of_the_very_pod_that_has_ended(lease: Lease, facts: PodFacts | None) -> None:
    if isinstance(watched(lease, facts), Ended):
        assert facts is not None
        assert facts.finished
        assert facts.uid == pod_of(lease).uid
