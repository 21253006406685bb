"""Requests that say how much isolation they need, or how much of a GPU's compute each process may use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mig_agent.core.errors import Reason, Refusal, UsageError
from mig_agent.core.model import GpuState, Isolation, Layout, Want, whole_gpu_layout
from mig_agent.core.planning.capacity import largest_share_mib
from mig_agent.core.planning.plan import CreateInstance, Plan
from mig_agent.core.planning.planner import plan
from mig_agent.core.requests import parse_compute, parse_isolation, validate
from mig_agent.core.shares import Enforcement, ShareTerms
from support.nodes import H100, Has, Machine, memory, node, request, whole

TERMS = ShareTerms(enforced_by=Enforcement.MPS, usable_mib=44_000, overhead_mib=128)
QUARTER = replace(memory("4G"), compute_percent=25)


def shareable(terms: ShareTerms = TERMS, state: str = "idle") -> Machine:
    """An L40S that is shared on these terms."""
    layout: Layout = whole_gpu_layout("NVIDIA L40S", 46_068, terms)
    return Machine(layout, (Has("whole", 0, state, "bob" if state == "leased" else ""),), GpuState.WHOLE, "no MIG")


def test_a_share_has_the_part_of_compute_that_was_asked_for() -> None:
    found = plan(node(shareable()), request(QUARTER))
    assert isinstance(found, Plan)
    serve = found.devices[0].serve
    assert isinstance(serve, CreateInstance)
    assert serve.slot.profile.compute_percent == 25


def test_mig_never_serves_a_part_of_compute_even_where_it_comes_first() -> None:
    found = plan(node(Machine(H100), shareable()), request(QUARTER))
    assert isinstance(found, Plan)
    assert found.devices[0].slot.profile.kind.shares_memory
    refusal = plan(node(Machine(H100)), request(QUARTER))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NOT_SUPPORTED
    assert "4G with 25% of the multiprocessors" in refusal.message
    assert "a MIG instance has compute slices of its own" in refusal.message


def test_what_limits_memory_alone_says_so() -> None:
    terms = replace(TERMS, enforced_by=Enforcement.CGROUP, overhead_mib=0)
    refusal = plan(node(shareable(terms)), request(QUARTER))
    assert isinstance(refusal, Refusal)
    assert "shares of GPU 0 are enforced by cgroup, which cannot limit compute" in refusal.message
    assert isinstance(plan(node(shareable(terms)), request(memory("4G"))), Plan)


def test_leaving_compute_out_is_no_hint_where_that_is_refused_too() -> None:
    refusal = plan(node(whole(capable=False)), request(QUARTER))
    assert isinstance(refusal, Refusal)
    assert refusal.message == "cannot place 4G with 25% of the multiprocessors: GPU 0 has no MIG mode and is not shared"
    assert "--compute" not in refusal.hint


@pytest.mark.parametrize(
    ("wants", "words"),
    [
        ((Want(profile="1g.10gb", compute_percent=25),), "only a share of a GPU has such a limit"),
        ((Want(whole_gpu=True, compute_percent=25),), "only a share of a GPU has such a limit"),
        ((replace(QUARTER, isolation=Isolation.MIG),), "cannot limit a MIG instance to 25%"),
        ((QUARTER, QUARTER), "one process cannot use two shares"),
        ((replace(QUARTER, compute_percent=101),), "from 1 to 100"),
        ((replace(QUARTER, compute_percent=0),), "from 1 to 100"),
    ],
)
def test_what_no_node_could_limit_is_refused_at_once(wants: tuple[Want, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        validate(request(*wants))


@pytest.mark.parametrize(("text", "percent"), [("25%", 25), ("25", 25), ("1%", 1), (" 100 % ", 100)])
def test_a_part_of_compute_is_whole_percents(text: str, percent: int) -> None:
    assert parse_compute(text) == percent


@pytest.mark.parametrize("text", ["", "0", "101%", "0.25", "1/4", "-5%", "many", "²5"])
def test_other_parts_of_compute_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError, match="as a part of compute") as refused:
        parse_compute(text)
    assert "25%" in refused.value.hint


def test_isolation_is_one_of_two_words() -> None:
    assert parse_isolation(" MIG ") is Isolation.MIG
    with pytest.raises(UsageError, match="cannot take strong as an isolation"):
        parse_isolation("strong")


def test_the_largest_share_is_that_of_the_emptiest_gpu() -> None:
    assert largest_share_mib(node(shareable(), Machine(H100))) == 44_000 - 128
    assert largest_share_mib(node(shareable(state="leased"))) == 0, "it is leased whole"
    assert largest_share_mib(node(Machine(H100))) == 0
    view = node(shareable(), shareable(replace(TERMS, others_mib=4_000)))
    assert largest_share_mib(view, reserved=frozenset({view.gpus[0].uuid})) == 40_000 - 128


def test_a_part_of_compute_is_had_by_mps_where_the_driver_comes_first() -> None:
    terms = replace(TERMS, enforced_by=Enforcement.CGROUP, needs_process=True, otherwise=Enforcement.MPS)
    assert terms.way(has_process=True) is Enforcement.CGROUP
    assert terms.way(has_process=False) is Enforcement.MPS
    assert terms.way(has_process=True, limits_compute=True) is Enforcement.MPS
    assert replace(terms, otherwise=None).way(has_process=True, limits_compute=True) is None
    assert isinstance(plan(node(shareable(terms)), request(QUARTER)), Plan)


def test_several_devices_that_would_be_shares_are_refused_for_what_they_are() -> None:
    two = request(memory("4G"), memory("4G"))
    refusal = plan(node(shareable(), shareable()), two)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.TOO_MANY_DEVICES
    assert refusal.message == (
        "cannot place 2 devices of 4G together: on this node they would be shares of GPUs, and one process cannot use "
        "two shares"
    )
    assert isinstance(plan(node(shareable(), Machine(H100)), two), Plan), "MIG instances, which it can"
