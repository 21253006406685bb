"""Shares of GPUs without MIG mode: terms, placement, refusals and counts of the pure planner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.model import (
    SHARE,
    Generation,
    Gpu,
    GpuState,
    Holder,
    Instance,
    InstanceState,
    Isolation,
    Layout,
    Lease,
    LeaseId,
    NodeView,
    RequestId,
    Slot,
    Want,
    whole_gpu_layout,
)
from mig_agent.core.planning.capacity import RemainingCapacity, servable
from mig_agent.core.planning.explain import explanation
from mig_agent.core.planning.feasibility import fewest_gpus
from mig_agent.core.planning.plan import DEFAULT_POLICY, CreateInstance, Plan
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.recording import RecordedPlan, from_json, record, replay, to_json
from mig_agent.core.planning.shares import largest_share, share_profile, shared_mib
from mig_agent.core.shares import Enforcement, ShareTerms
from support.nodes import H100, Has, Machine, memory, node, request

TERMS = ShareTerms(enforced_by=Enforcement.MPS, usable_mib=44_000, overhead_mib=128)
L40S = whole_gpu_layout("NVIDIA L40S", 46_068, TERMS)
T4 = whole_gpu_layout("NVIDIA T4", 15_360, replace(TERMS, usable_mib=14_500))
WHOLE = Want(whole_gpu=True, text="whole")


def shareable(layout: Layout = L40S, state: str = "idle", holder: str = "") -> Machine:
    """A GPU without MIG mode that can be shared."""
    return Machine(layout, (Has("whole", 0, state, holder),), GpuState.WHOLE, "MIG mode is off")


def with_shares(view: NodeView, gpu: int, *limits: int, state: str = "leased") -> NodeView:
    """The node with shares on a GPU, each leased to a user of its own."""
    shared, leases = view.gpus[gpu], dict(view.leases)
    instances = list(shared.instances)
    for limit in limits:
        number = 1000 * (gpu + 1) + len(instances)
        lease = LeaseId(f"share-{number}")
        profile = share_profile(limit)
        leases[lease] = Lease(
            id=lease,
            request_id=RequestId(str(lease)),
            holder=Holder(name=f"user-{number}"),
            instances=(Generation(number),),
            created_at=0.0,
            expires_at=100.0,
        )
        instances.append(
            Instance(
                slot=Slot(shared.uuid, profile, profile.placements[0]),
                generation=Generation(number),
                state=InstanceState(state),
                lease=lease,
            )
        )
    gpus = list(view.gpus)
    gpus[gpu] = replace(shared, instances=tuple(instances))
    return replace(view, gpus=tuple(gpus), leases=leases)


def planned(view: NodeView, *wants: Want) -> Plan:
    outcome = plan(view, request(*wants))
    assert isinstance(outcome, Plan), outcome
    return outcome


def refused(view: NodeView, *wants: Want, now: float = 0.0) -> Refusal:
    outcome = plan(view, request(*wants), now=now)
    assert isinstance(outcome, Refusal), outcome
    return outcome


def slot_of(outcome: Plan) -> Slot:
    (device,) = outcome.devices
    assert isinstance(device.serve, CreateInstance)
    assert not device.victims
    return device.serve.slot


# Terms


@pytest.mark.parametrize(
    ("wanted", "limit"),
    [(4_000_000_000, 3815), (1, 1024), (1 << 30, 1024), ((1 << 30) + 1, 1025), (43_872 << 20, 43_872)],
)
def test_a_limit_is_rounded_up_to_mib_and_to_the_least_one(wanted: int, limit: int) -> None:
    assert TERMS.limit_of_memory(wanted) == limit


def test_no_share_has_more_than_the_gpu_can_share() -> None:
    assert TERMS.limit_of_memory(43_873 << 20) is None


@given(
    parts=st.integers(1, 40),
    usable=st.integers(1100, 200_000),
    overhead=st.integers(0, 512),
    least=st.integers(1, 2048),
)
def test_n_shares_of_one_nth_always_fit(parts: int, usable: int, overhead: int, least: int) -> None:
    terms = ShareTerms(enforced_by=Enforcement.CGROUP, usable_mib=usable, overhead_mib=overhead, least_mib=least)
    limit = terms.limit_of_fraction(1 / parts)
    if limit is not None:
        assert limit >= least
        assert parts * terms.taken(limit) <= usable


# Placement


def test_memory_without_mig_gets_a_share_of_just_that_much() -> None:
    outcome = planned(node(shareable()), memory("4G"))
    slot = slot_of(outcome)
    assert slot.profile.kind is SHARE
    assert slot.profile.memory_mib == 3815
    assert str(slot) == "share of 3.72 GiB"
    assert outcome.wasted_mib == 0.0


def test_mig_comes_first_even_where_a_share_would_waste_nothing() -> None:
    view = node(shareable(), Machine(H100))
    assert slot_of(planned(view, memory("4G"))).profile.name == "1g.10gb"
    full = node(shareable(), Machine(H100, (Has("7g.80gb", 0, "leased", "alice"),)))
    assert slot_of(planned(full, memory("4G"))).profile.kind is SHARE


def test_who_asks_for_mig_gets_no_share() -> None:
    view = node(shareable())
    refusal = refused(view, replace(memory("4G"), isolation=Isolation.MIG))
    assert refusal.reason is Reason.NO_MIG_GPU
    assert "GPU 0 is not in MIG mode" in refusal.message
    assert "without --isolation mig" in refusal.hint
    beside = plan(
        node(shareable(), Machine(H100)), replace(request(replace(memory("4G"), isolation=Isolation.MIG)), gpus=("0",))
    )
    assert isinstance(beside, Refusal)
    assert beside.hint == "GPU 1 could serve it: leave --gpu out"
    full = node(shareable(), Machine(H100, (Has("7g.80gb", 0, "leased", "alice"),)))
    assert refused(full, replace(memory("4G"), isolation=Isolation.MIG)).reason is Reason.NO_CAPACITY


@pytest.mark.parametrize(
    "want", [memory("4G", min_compute=2), memory("4G", attributes=["+me"]), Want(profile="1g.10gb", text="1g.10gb")]
)
def test_what_only_mig_has_is_no_share(want: Want) -> None:
    assert isinstance(plan(node(shareable()), request(want)), Refusal)


def test_the_fullest_gpu_that_fits_is_shared_further_and_whole_ones_stay_whole() -> None:
    view = with_shares(with_shares(node(shareable(), shareable(), shareable()), 1, 20_000), 2, 30_000)
    assert slot_of(planned(view, memory("4G"))).gpu == view.gpus[2].uuid
    assert slot_of(planned(view, memory("20G"))).gpu == view.gpus[1].uuid
    assert slot_of(planned(view, memory("30G"))).gpu == view.gpus[0].uuid
    assert planned(view, WHOLE).devices[0].gpu == view.gpus[0].uuid
    # An empty small GPU has less left afterwards, and is left whole all the same.
    mixed = with_shares(node(shareable(T4), shareable()), 1, 1024)
    assert slot_of(planned(mixed, memory("10G"))).gpu == mixed.gpus[1].uuid


def test_a_gpu_is_whole_or_shared_never_both() -> None:
    shared = with_shares(node(shareable()), 0, 1024)
    refusal = refused(shared, WHOLE)
    assert refusal.reason is Reason.NO_CAPACITY
    assert "a share of 1 GiB is leased to user-" in refusal.message
    leased = node(shareable(L40S, "leased", "alice"))
    refusal = refused(leased, memory("4G"))
    assert refusal.reason is Reason.NO_CAPACITY
    assert "the whole GPU is leased to alice" in refusal.message


def test_a_refusal_names_the_shares_in_the_way_and_what_would_fit() -> None:
    view = with_shares(node(shareable()), 0, 30_000, 8_000)
    refusal = refused(view, memory("20G"), now=40.0)
    assert refusal.message.startswith(
        "cannot place 20G (a share of 18.62 GiB) on GPU 0: a share of 29.29 GiB is leased"
    )
    assert "5.25Gi would fit now (a share of GPU 0)" in refusal.hint
    assert "is free for it in 1m" in refusal.hint
    assert [each.what for each in refusal.blockers] == ["share of 29.29 GiB"]


def test_what_no_gpu_could_share_is_refused_for_good() -> None:
    refusal = refused(node(shareable()), memory("60G"))
    assert refusal.reason is Reason.TOO_LARGE
    assert refusal.message == "cannot place 60G: a share of GPU 0 has 1 GiB to 42.84 GiB"
    assert refusal.hint == "ask for at most 42.84 GiB; a whole GPU has 44.98 GiB"
    enough = refused(node(shareable()), memory("44Gi")).hint
    assert enough == "ask for at most 42.84 GiB; --num-gpus 1 takes a whole GPU (44.98 GiB)"
    refusal = refused(node(shareable()), Want(fraction=0.01, text="0.01"))
    assert refusal.reason is Reason.TOO_LARGE
    assert refusal.hint == "a share has at least 1 GiB"


def test_several_devices_are_never_shares() -> None:
    assert isinstance(plan(node(shareable(), shareable()), request(memory("4G"), memory("4G"))), Refusal)
    assert len(planned(node(shareable(), shareable()), WHOLE, WHOLE).devices) == 2


def test_shares_that_are_being_made_or_ended_still_count() -> None:
    for state in ("creating", "destroying", "blocked", "idle"):
        view = with_shares(node(shareable()), 0, 40_000, state=state)
        assert refused(view, memory("8G")).reason is Reason.NO_CAPACITY
        assert refused(view, WHOLE).reason is Reason.NO_CAPACITY


# Counts, reservations, explanations, recordings


def test_counts_are_exact_over_mig_and_shares() -> None:
    view = with_shares(node(shareable(), Machine(H100)), 0, 20_000)
    left = 44_000 - 20_128
    want = memory("4G")
    assert RemainingCapacity(view).creatable(want) == left // (3815 + 128) + 7
    assert servable(view, want) == 44_000 // (3815 + 128) + 7
    assert RemainingCapacity(view, before=[WHOLE]).creatable(want) == left // (3815 + 128) + 0
    assert RemainingCapacity(node(shareable()), before=[WHOLE]).creatable(want) == 0


def test_the_gpu_where_fewest_shares_have_to_end_is_reserved() -> None:
    view = with_shares(with_shares(node(shareable(), shareable()), 0, 10_000, 10_000, 10_000), 1, 39_000)
    assert fewest_gpus(view.gpus, [memory("30G")]) == {view.gpus[1].uuid}
    assert fewest_gpus(view.gpus, [WHOLE]) == {view.gpus[1].uuid}


def test_an_explanation_shows_both_kinds() -> None:
    lines = explanation(node(shareable(), Machine(H100)), request(memory("4G")))
    assert "1g.10gb" in lines[1]
    assert "(chosen)" in lines[1]
    below = lines.index("  shares, only where nothing else fits:")
    assert "GPU 0: create share of 3.72 GiB" in lines[below + 1]
    assert not any("share of" in line for line in lines[:below])
    alone = explanation(node(shareable()), request(memory("4G")))
    assert "create share of 3.72 GiB" in alone[1]


def test_a_recorded_node_with_shares_makes_the_same_plans() -> None:
    view = with_shares(node(shareable(), shareable()), 0, 20_000)
    requests = [request(memory("4G")), request(memory("60G")), request(WHOLE)]
    plans = tuple(RecordedPlan(request=each, outcome=plan(view, each), waits=False) for each in requests)
    again = from_json(to_json(record(view, DEFAULT_POLICY, 0.0, plans, "1")))
    assert all(each.is_identical for each in replay(again))


@given(
    wants=st.lists(
        st.one_of(
            st.integers(1, 50_000).map(lambda mib: Want(memory_bytes=mib << 20, text=f"{mib}Mi")),
            st.floats(0.01, 1.0).map(lambda part: Want(fraction=part, text=f"{part}")),
            st.just(WHOLE),
        ),
        max_size=30,
    ),
    ends=st.lists(st.integers(0, 29), max_size=30),
)
def test_the_sum_on_a_gpu_never_exceeds_what_it_can_share(wants: list[Want], ends: list[int]) -> None:
    """Whatever comes and goes: limits with their overhead stay within the usable memory, whole GPUs are alone."""
    view = node(shareable(), shareable(T4), Machine(H100))
    for number, want in enumerate(wants):
        outcome = plan(view, request(want))
        if isinstance(outcome, Plan):
            view = applied(view, outcome, number)
        for ending in ends[number : number + 1]:
            view = ended(view, ending)
        for gpu in view.gpus:
            whole = [each for each in gpu.instances if each.kind.takes_whole_gpu]
            shares = [each for each in gpu.instances if each.kind is SHARE]
            if gpu.layout.shares is not None:
                assert shared_mib(gpu) <= gpu.layout.shares.usable_mib
                assert not shares or whole[0].state is InstanceState.IDLE
                largest = largest_share(gpu)
                if largest is not None:
                    assert gpu.layout.shares.taken(largest.memory_mib) + shared_mib(gpu) == gpu.layout.shares.usable_mib
            else:
                assert not shares


def applied(view: NodeView, outcome: Plan, number: int) -> NodeView:
    """The node after a plan for one device."""
    (device,) = outcome.devices
    gpu = view.by_uuid[device.gpu]
    gone = {victim.instance.generation for victim in device.victims}
    kept = [each for each in gpu.instances if each.generation not in gone]
    if isinstance(device.serve, CreateInstance):
        generation = Generation(10_000 + number)
        kept.append(
            Instance(
                slot=device.serve.slot,
                generation=generation,
                state=InstanceState.LEASED,
                gpu_instance_id=number,
                compute_instance_id=0,
            )
        )
    else:
        reused = device.serve.instance
        kept = [replace(each, state=InstanceState.LEASED) if each is reused else each for each in kept]
    return _with(view, replace(gpu, instances=tuple(kept)))


def ended(view: NodeView, number: int) -> NodeView:
    """The node after one lease, by its place among all, has ended."""
    leased = [each for gpu in view.gpus for each in gpu.instances if each.state is InstanceState.LEASED]
    if not leased:
        return view
    ending = leased[number % len(leased)]
    gpu = view.by_uuid[ending.slot.gpu]
    kept = [
        replace(each, state=InstanceState.IDLE) if each is ending else each
        for each in gpu.instances
        if each is not ending or each.kind.is_reusable
    ]
    return _with(view, replace(gpu, instances=tuple(kept)))


def _with(view: NodeView, changed: Gpu) -> NodeView:
    gpus = tuple(changed if each.uuid == changed.uuid else each for each in view.gpus)
    return replace(view, gpus=gpus)
