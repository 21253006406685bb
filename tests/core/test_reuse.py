"""Whose idle instances serve whom: not another tenant's where that is forbidden, and no place is lost by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.core.model import Gpu, Holder, InstanceState, NodeView, Request, Want
from mig_agent.core.planning.explain import explanations
from mig_agent.core.planning.plan import CreateInstance, DestroyInstance, Plan, Policy, Reuse, ReuseInstance
from mig_agent.core.planning.planner import plan
from mig_agent.core.queue import Queue
from support.nodes import A100_40, H100, WHOLE, Has, Machine, node, nodes, profile, request, wants_for, whole
from support.queueing import next_to_start

TENANTS = (None, "", "alice", "bob")


def with_tenants(view: NodeView, tenants: Sequence[str | None]) -> NodeView:
    """The same node; its instances were held by these tenants last, in turn."""
    number = 0

    def gpu(each: Gpu) -> Gpu:
        nonlocal number
        instances = []
        for instance in each.instances:
            instances.append(replace(instance, last_tenant=tenants[number % len(tenants)]))
            number += 1
        return replace(each, instances=tuple(instances))

    return replace(view, gpus=tuple(gpu(each) for each in view.gpus))


def asked(*wants: Want, tenant: str = "alice") -> Request:
    return replace(request(*wants), holder=Holder(tenant=tenant, name=tenant))


def planned(view: NodeView, wanted: Request, reuse: Reuse) -> Plan:
    outcome = plan(view, wanted, Policy(reuse=reuse, creation_cost=100.0))  # whatever can be reused is
    assert isinstance(outcome, Plan), outcome
    return outcome


ONE_IDLE = node(Machine(A100_40, [Has("2g.10gb", 2)]))


@pytest.mark.parametrize(
    ("reuse", "held_by", "tenant", "reused"),
    [
        (Reuse.ANY, "bob", "alice", True),
        (Reuse.ANY, "", "", True),
        (Reuse.SAME_TENANT, "alice", "alice", True),
        (Reuse.SAME_TENANT, "bob", "alice", False),
        (Reuse.SAME_TENANT, None, "alice", True),
        (Reuse.SAME_TENANT, "", "", False),  # two of whom nothing is known need not be the same
        (Reuse.SAME_TENANT, "", "alice", False),
        (Reuse.SAME_TENANT, "alice", "", False),
        (Reuse.NEVER, "alice", "alice", False),
        (Reuse.NEVER, None, "alice", True),
    ],
)
def test_reuse_policy_by_last_tenant(reuse: Reuse, held_by: str | None, tenant: str, *, reused: bool) -> None:
    view = with_tenants(ONE_IDLE, [held_by])
    found = planned(view, asked(profile("2g.10gb"), tenant=tenant), reuse)
    assert isinstance(found.devices[0].serve, ReuseInstance) is reused


def test_another_tenants_instance_is_destroyed_where_its_slices_are_needed() -> None:
    full = node(Machine(A100_40, [Has("3g.20gb", 0, "leased", "carol"), Has("3g.20gb", 4)]))
    found = planned(with_tenants(full, ["carol", "bob"]), asked(profile("3g.20gb")), Reuse.SAME_TENANT)
    assert [type(each) for each in found.steps] == [DestroyInstance, CreateInstance]
    assert found.devices[0].slot.placement.start == 4


def test_of_several_idle_instances_the_own_one_serves() -> None:
    view = with_tenants(
        node(Machine(H100, [Has("1g.10gb", 0), Has("1g.10gb", 5), Has("1g.10gb", 6)])), ["x", "alice", "x"]
    )
    found = planned(view, asked(profile("1g.10gb")), Reuse.SAME_TENANT)
    serve = found.devices[0].serve
    assert isinstance(serve, ReuseInstance)
    assert serve.instance.slot.placement.start == 5


def test_the_same_view_serves_several_tenants_by_turns() -> None:
    """What was computed for one tenant is not taken for another."""
    view = with_tenants(node(Machine(H100, [Has("1g.10gb", 0), Has("1g.10gb", 5)])), ["alice", "bob"])
    for tenant, start in (("alice", 0), ("bob", 5), ("alice", 0)):
        serve = planned(view, asked(profile("1g.10gb"), tenant=tenant), Reuse.SAME_TENANT).devices[0].serve
        assert isinstance(serve, ReuseInstance)
        assert serve.instance.slot.placement.start == start
    assert isinstance(planned(view, asked(profile("1g.10gb")), Reuse.NEVER).devices[0].serve, CreateInstance)
    assert isinstance(planned(view, asked(profile("1g.10gb"), tenant="x"), Reuse.ANY).devices[0].serve, ReuseInstance)


def test_a_whole_gpu_is_reused_by_every_tenant() -> None:
    view = with_tenants(node(whole()), ["bob"])
    for reuse in Reuse:
        assert isinstance(planned(view, asked(WHOLE), reuse).devices[0].serve, ReuseInstance)


def test_a_dry_run_explains_what_would_be_destroyed() -> None:
    wanted = asked(profile("2g.10gb"))
    (told,) = explanations(with_tenants(ONE_IDLE, ["bob"]), wanted, Policy(reuse=Reuse.SAME_TENANT))
    assert not any(option.reuse for option in told.options)
    assert any(option.victims for option in told.options)


def test_a_waiting_request_is_served_by_its_own_policy() -> None:
    queue = Queue()
    queue.add(asked(profile("2g.10gb")), 0.0)
    view = with_tenants(ONE_IDLE, ["bob"])
    found = next_to_start(view, queue.waiting, Policy(reuse=Reuse.SAME_TENANT), 0.0, limit_seconds=1.0)
    assert found is not None
    assert isinstance(found[1].devices[0].serve, CreateInstance)


@settings(deadline=None)
@given(
    view=nodes(most=3),
    tenants=st.lists(st.sampled_from(TENANTS), min_size=1, max_size=8),
    wants=st.lists(wants_for(), min_size=1, max_size=3),
    tenant=st.sampled_from(("", "alice", "bob")),
    reuse=st.sampled_from((Reuse.SAME_TENANT, Reuse.NEVER)),
)
def test_reuse_policies_are_strict_and_cost_no_capacity(
    view: NodeView, tenants: list[str | None], wants: list[Want], tenant: str, reuse: Reuse
) -> None:
    seen = with_tenants(view, tenants)
    wanted = asked(*wants, tenant=tenant)
    outcome = plan(seen, wanted, Policy(reuse=reuse))
    assert isinstance(outcome, Plan) is isinstance(plan(seen, wanted, Policy()), Plan)
    if not isinstance(outcome, Plan):
        return
    gone = {step.instance.generation for step in outcome.steps if isinstance(step, DestroyInstance)}
    taken: dict[str, int] = {}
    for device in outcome.devices:
        assert not taken.get(device.gpu, 0) & device.slot.placement.mask
        taken[device.gpu] = taken.get(device.gpu, 0) | device.slot.placement.mask
        if isinstance(device.serve, ReuseInstance):
            held_by = device.serve.instance.last_tenant
            assert held_by is None or (reuse is Reuse.SAME_TENANT and held_by == tenant != "")
        else:
            standing = [
                each
                for each in seen.by_uuid[device.gpu].instances
                if each.slot.placement.mask & device.slot.placement.mask
            ]
            assert all(each.state is InstanceState.IDLE and each.generation in gone for each in standing)
