"""What each user and each tenant may hold: which limit counts, and what a refusal says."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.limits import (
    NO_LIMITS,
    Amount,
    Held,
    Limit,
    LimitedCaller,
    LimitValue,
    UsageLimits,
    amount_of,
    exceeded_now,
    held,
    never_within,
    renewal_within,
    too_many_waiting,
    ttl_within,
)
from mig_agent.core.model import CallerId, Request
from support.nodes import A30, H100, WHOLE, Has, Machine, memory, node, profile, request, whole

GIB = 1 << 30
ALICE = LimitedCaller(caller_id=CallerId("uid 1000"), names=("alice", "uid 1000"), role="user", tenant="vision")
NODE = node(Machine(H100), Machine(A30))


def bounds(**values: float) -> Mapping[Limit, LimitValue]:
    return {
        Limit(name): LimitValue(value=value, text=f"{value}", setting=f"limits.{name}")
        for name, value in values.items()
    }


def now(mine: Amount = Amount(), tenant: Amount = Amount()) -> Held:  # noqa: B008 -- frozen
    return Held({ALICE.caller_id: mine}, {"vision": tenant}, 100 * GIB)


def asked(*, priority: int = 0) -> Request:
    return request(memory("4G"), priority=priority)


ONE = Amount(memory_bytes=10 * GIB, memory_slices=1, leases=1)


def test_without_limits_all_is_allowed() -> None:
    assert not NO_LIMITS
    assert exceeded_now(NO_LIMITS, ALICE, ONE, now(ONE, ONE)) is None
    assert never_within(NO_LIMITS, ALICE, asked(priority=10**6), ONE, GIB) is None
    assert ttl_within(NO_LIMITS, ALICE, None) is None


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("leases", 2, "alice holds 2 of at most 2 leases"),
        ("memory", 25 * GIB, "alice holds 20Gi of at most 26843545600, and this takes 10Gi more"),
        ("memory_slices", 2, "alice holds 2 of at most 2 memory slices, and this takes 1 more"),
        ("share", 0.25, "alice holds 20Gi of at most 25Gi, its share of 0.25 of the node, and this takes 10Gi more"),
    ],
)
def test_a_refusal_says_which_limit_and_which_setting(limit: str, value: float, words: str) -> None:
    limits = UsageLimits(users={"alice": bounds(**{limit: value})})
    refusal = exceeded_now(limits, ALICE, ONE, now(ONE + ONE, ONE + ONE))
    assert refusal is not None
    assert refusal.reason is Reason.LIMIT_EXCEEDED
    assert refusal.retryable
    assert refusal.message == f"cannot exceed a limit: {words} (set by limits.{limit})"
    assert exceeded_now(limits, ALICE, ONE, now(ONE, ONE)) is None


def test_the_own_limit_of_a_user_wins_over_the_one_of_the_role() -> None:
    limits = UsageLimits(roles={"user": bounds(leases=1, memory=15 * GIB)}, users={"alice": bounds(leases=5)})
    assert exceeded_now(limits, ALICE, Amount(leases=1), now(Amount(leases=3))) is None
    by_role = exceeded_now(limits, ALICE, ONE, now(ONE))
    assert by_role is not None
    assert "limits.memory" in by_role.message
    assert exceeded_now(UsageLimits(users={"uid 1000": bounds(leases=0)}), ALICE, ONE, now()) is not None


def test_a_tenant_counts_all_of_its_leases_and_everybody_else_those_of_their_own() -> None:
    limits = UsageLimits(tenants={"*": bounds(leases=2), "vision": bounds(leases=4)})
    assert exceeded_now(limits, ALICE, ONE, now(ONE, Amount(leases=3))) is None
    refusal = exceeded_now(limits, ALICE, ONE, now(ONE, Amount(leases=4)))
    assert refusal is not None
    assert refusal.message.startswith("cannot exceed a limit: tenant vision holds 4 of at most 4 leases")


def test_what_is_never_within_the_limits_is_permanent() -> None:
    limits = UsageLimits(users={"alice": bounds(memory=5 * GIB)})
    refusal = never_within(limits, ALICE, asked(), ONE, 100 * GIB)
    assert refusal is not None
    assert refusal.reason is Reason.OUTSIDE_LIMITS
    assert not refusal.retryable
    assert "alice may hold at most 5368709120, and this takes 10Gi" in refusal.message


@pytest.mark.parametrize(("priority", "allowed"), [(-3, False), (-2, True), (5, True), (6, False)])
def test_the_range_of_priorities(priority: int, *, allowed: bool) -> None:
    limits = UsageLimits(roles={"user": bounds(lowest_priority=-2, highest_priority=5)})
    refusal = never_within(limits, ALICE, asked(priority=priority), ONE, GIB)
    assert (refusal is None) is allowed
    if refusal is not None:
        assert f"priority {priority} is " in refusal.message


def test_the_ttl_is_given_or_bounded() -> None:
    limits = UsageLimits(
        roles={"user": bounds(default_ttl=600, longest_ttl=3600)}, tenants={"*": bounds(longest_ttl=1800)}
    )
    assert ttl_within(limits, ALICE, None) == 600
    assert ttl_within(limits, ALICE, 1800) == 1800
    refused = ttl_within(limits, ALICE, 1801)
    assert isinstance(refused, Refusal)
    assert "a ttl of 30m1s is longer than 1800" in refused.message
    assert ttl_within(UsageLimits(users={"alice": bounds(longest_ttl=60)}), ALICE, None) == 60
    assert renewal_within(limits, ALICE, 60) is None
    forever = renewal_within(limits, ALICE, None)
    assert forever is not None
    assert "no deadline is longer than 1800" in forever.message


def test_waiting_requests_are_counted_for_user_and_tenant() -> None:
    limits = UsageLimits(roles={"user": bounds(waiting=2)}, tenants={"*": bounds(waiting=3)})
    assert too_many_waiting(limits, ALICE, 1, 2) is None
    own, tenants = too_many_waiting(limits, ALICE, 2, 2), too_many_waiting(limits, ALICE, 0, 3)
    assert own is not None
    assert own.message.startswith("cannot exceed a limit: alice has 2 waiting requests of at most 2")
    assert tenants is not None
    assert "tenant vision has 3 waiting requests of at most 3" in tenants.message


def test_a_request_counts_as_on_the_model_where_it_takes_most() -> None:
    both, a30 = amount_of(NODE, asked()), amount_of(NODE, request(memory("4G"), gpus=["1"]))
    assert both.memory_bytes > a30.memory_bytes
    assert (both.memory_slices, both.leases) == (1, 1)
    assert amount_of(NODE, request(profile("9g.99gb"))) == Amount(leases=1)
    assert amount_of(node(whole()), request(WHOLE)).memory_slices == 8


def test_what_is_held_is_counted_from_the_leases_and_the_plans_in_progress() -> None:
    view = node(Machine(H100, [Has("2g.20gb", 0, "leased", "alice"), Has("1g.10gb", 2, "leased", "bob")]))
    found = held(view, view.leases.values(), [(CallerId("uid 1000"), "vision", ONE)])
    assert found.by_caller[CallerId("uid 1000")] == ONE
    assert sum(each.leases for each in found.by_caller.values()) == 3
    assert sum(each.memory_slices for each in found.by_tenant.values()) == 4
    assert found.node_memory_bytes == view.gpus[0].layout.memory_mib << 20
